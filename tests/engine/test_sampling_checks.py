"""What an engine refuses of a request's sampling, whoever sent it."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import pytest
from engine_double import Engine

from sluice_engine.leader.scheduling.admission import admit
from sluice_engine.leader.scheduling.sampling_checks import fault_of
from sluice_engine.leader.scheduling.sequence import Mode, SequenceSpec
from sluice_protocol.sampling import BIAS, BOUNDS, Sampling

VOCAB = 64
NAN, INF = math.nan, math.inf
BAD: list[tuple[str, object]] = [
    *((name, value) for name in BOUNDS for value in (NAN, INF, -INF)),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 1e-310),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", 101.0),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -1e30),
    ("top_k", -1),
    ("top_k", 2**31),
    ("max_tokens", 2**31),
    ("max_tokens", -1),
    ("logit_bias", ((VOCAB, 1.0),)),
    ("logit_bias", ((3, 1.0), (2**32 - 1, 1.0))),
    ("logit_bias", ((-1, 1.0),)),
    ("logit_bias", ((3, NAN),)),
    ("logit_bias", ((3, INF),)),
    ("logit_bias", ((3, 101.0),)),
    ("top_logprobs", 21),
    ("top_logprobs", -1),
]


@pytest.mark.parametrize(("field", "value"), BAD)
@pytest.mark.parametrize("mode", [Mode.UNIFIED, Mode.READER, Mode.SOURCE])
def test_a_bad_value_is_refused_by_name_and_for_good(field, value, mode):
    sampling = replace(Sampling(), **{field: value})
    engine = Engine()
    refused = admit(engine.state, SequenceSpec(1, mode, (1, 2), (), sampling))
    assert refused is not None
    assert (refused.reason, refused.retry_after_ms) == ("BadSampling", 0)
    assert refused.detail.startswith(field)
    assert not engine.state.sequences


def wire(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def test_every_bound_itself_is_allowed_even_after_the_wire_has_rounded_it():
    for name, bound in BOUNDS.items():
        for value in bound:
            for told in (value, wire(value)):
                assert fault_of(replace(Sampling(), **{name: told}), VOCAB) is None, (name, told)
    for value in BIAS:
        assert fault_of(Sampling(logit_bias=((0, value), (VOCAB - 1, value))), VOCAB) is None


def test_whatever_is_only_compared_may_be_anything():
    told = Sampling(stop_token_ids=(0, 2**32 - 1), seed=2**64 - 1, choice=2**32 - 1, top_k=10**6, top_logprobs=20)
    assert fault_of(told, VOCAB) is None
