"""Pod templates are tried against the API server: what it does not know is refused once, and never after that."""

from __future__ import annotations

from dataclasses import replace

import pytest
from operator_cluster import Cluster as Simulated
from operator_cluster import manifest, with_tag
from template_api import Api, look, nothing

from sluice_operator.api.enums import ConditionStatus
from sluice_operator.api.status import Condition
from sluice_operator.render.revision import StandardRenderer

TYPO = {"template": {"spec": {"tolerationz": [{"key": "a"}]}}}


def running(**changes):
    """What is there once all of it serves."""
    cluster = Simulated(manifest(image=with_tag("A"), **changes))
    cluster.run(300)
    assert cluster.condition("Ready").status is ConditionStatus.TRUE
    return cluster.observe()


@pytest.mark.parametrize("role", ["prefill", "decode", "gateway"])
async def test_a_new_template_with_a_field_that_nobody_knows_is_refused_with_its_path(role):
    told, warning = await look(Api(), nothing(), **{role: TYPO})
    assert told.startswith(f"spec.{role}.template.spec.tolerationz: is no field that this cluster has")
    assert warning == ""


async def test_all_that_are_wrong_are_named_at_once():
    told, _ = await look(Api(), nothing(), decode={"template": {"spec": {"tolerationz": [], "priorityClass": "x"}}})
    assert "spec.decode.template.spec.tolerationz, spec.decode.template.spec.priorityClass" in told


@pytest.mark.parametrize("role", ["prefill", "decode", "gateway"])
async def test_one_that_was_accepted_before_is_only_warned_of(role):
    """By an operator that did not ask so strictly."""
    seen, api, checked = running(**{role: TYPO}), Api(), {}
    for _ in range(3):
        told, warning = await look(api, seen, checked, **{role: TYPO})
        assert told == ""
        assert f"spec.{role}.template.spec.tolerationz" in warning
    assert api.offered == [(role, "Strict"), (role, "Ignore")]  # once


async def test_a_gateway_that_a_new_operator_renders_otherwise_is_none_that_was_never_accepted():
    seen = running(gateway=TYPO)
    other = StandardRenderer("control:2")
    told, warning = await look(Api(), seen, renderer=other, gateway=TYPO)
    assert (told, "spec.gateway.template.spec.tolerationz" in warning) == ("", True)
    lost = replace(seen, status=replace(seen.status, conditions=()))
    assert (await look(Api(), lost, renderer=other, gateway=TYPO))[0] == ""
    # A change of the spec is looked at anew, and stays refused.
    changed = replace(seen, generation=seen.generation + 1)
    assert "tolerationz" in (await look(Api(), changed, renderer=other, gateway=TYPO))[0]
    refused = Condition("Accepted", ConditionStatus.FALSE, "TemplateInvalid", "", changed.generation, "")
    kept = replace(changed, status=replace(seen.status, observed_generation=changed.generation, conditions=(refused,)))
    assert "tolerationz" in (await look(Api(), kept, renderer=other, gateway=TYPO))[0]


async def test_a_field_of_ours_that_an_old_api_server_does_not_know_is_no_fault_of_the_template():
    api = Api(lacks=("terminationGracePeriodSeconds",))
    assert await look(api, nothing()) == ("", "")
    assert api.offered[:2] == [("prefill", "Strict"), ("prefill", "Ignore")]
    # And hides nothing that is wrong besides.
    words = "spec.template.spec.containers[0].image: Required value"
    told, _ = await look(Api(lacks=("terminationGracePeriodSeconds",), invalid=words), nothing())
    assert words in told


async def test_a_value_that_the_api_server_refuses_is_told_in_its_words():
    told, _ = await look(Api(invalid="spec.template.spec.tolerations[0].operator: Unsupported value"), nothing())
    assert told.startswith("spec: spec.template.spec.tolerations[0].operator: Unsupported value")


async def test_what_runs_and_has_no_such_field_is_not_asked_about():
    api = Api()
    assert await look(api, running()) == ("", "")
    assert api.offered == []


def test_the_warning_is_in_the_condition_and_an_event_once():
    cluster = Simulated(manifest(image=with_tag("A")))
    cluster.run(200)
    words = "spec.decode.template.spec.tolerationz is no field that this cluster has, and is without effect."
    observe = cluster.observe
    cluster.observe = lambda: replace(observe(), warning=words)
    told = len(cluster.log)
    cluster.run(100)
    assert cluster.condition("Accepted").status is ConditionStatus.TRUE
    assert words in cluster.condition("Accepted").message
    assert cluster.condition("Ready").status is ConditionStatus.TRUE
    assert [line for line in cluster.log[told:] if "UnknownFields" in line] == [f"event UnknownFields: {words}"]
