"""What each reason means and what a person does about it: for `sluice doctor` and for docs/health.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sluice_engine.watched_rows import EngineReason
from sluice_gateway.status.watched_rows import GatewayReason
from sluice_runtime.health.watched import Reason


@dataclass(frozen=True, slots=True)
class Advice:
    meaning: str
    remedy: str


_RESTART = "The service is started again by itself"
ADVICE: Mapping[str, Advice] = {
    EngineReason.SCHEDULER_FROZEN: Advice(
        "the leader's loop does not turn: it hangs in planning a step, or after all ranks have answered",
        "Read the stack of `leader.loop`; a plan that does not end is a defect: report it with the bundle.",
    ),
    Reason.EVENT_LOOP_BLOCKED: Advice(
        "a callback of an event loop (leader or gateway) does not return, so nothing else of that process runs",
        "Read the stack of the loop's thread: the innermost line blocks. Look for slow disks or a stopped process.",
    ),
    EngineReason.LEASE_THREAD_DEAD: Advice(
        "the thread that serves and holds leases has ended or does not turn: no handoff can begin or end",
        "Read the stack and the last events; what its peer sent last is in the leader's events.",
    ),
    EngineReason.RANK_FROZEN: Advice(
        "a rank does not receive, execute or report steps, though it is not in the model",
        "Look at its process: stopped by a signal, swapped out, or waiting for a lock (`rank0.proc`, `rank0.stacks`).",
    ),
    EngineReason.RANK_DEAD: Advice(
        "a rank's process has ended, or the leader lost its connection",
        "Look at the exit status: -9 is most often the kernel's memory killer (`dmesg`); give the engine less memory.",
    ),
    EngineReason.DEVICE_STUCK: Advice(
        "a step was handed to the model and did not come back within many times what it should take",
        "Look at the device (driver messages, other users of it) or, on a CPU, at who else needs the cores.",
    ),
    EngineReason.COLLECTIVE_STUCK: Advice(
        "a rank waits in a collective that others did not enter or did not finish",
        "Compare step number and phase of all ranks; the one that is behind is the cause. Look at the links between.",
    ),
    EngineReason.TRANSFER_STALLED: Advice(
        "the transport sidecar does not turn, or owes records and moves none",
        "Look at the peer named in the transfers and at the lane between the two; then at the sidecar's stacks.",
    ),
    Reason.QUEUE_STARVED: Advice(
        "work waits though there is room for it and none of it is admitted, or runs and is in no step",
        "A defect of admission or scheduling: report it with the bundle (books, rooms and the last steps say why).",
    ),
    EngineReason.TIER_STUCK: Advice(
        "copies to or from a cache tier do not move",
        "Look at the tier's storage or its server; the engine serves without the tier when it is turned off.",
    ),
    Reason.NOT_ACCEPTING: Advice(
        "connections wait at the port of a leader or gateway, and none of them is accepted",
        "Look at the process's open files against its limit (`*.proc`: limits, and /proc/PID/fd): raise `nofile`.",
    ),
    Reason.RPC_FROZEN: Advice(
        "gRPC's own threads do not carry a call of the process to itself, so they carry none of anybody's",
        "Look at the process's threads without a Python stack (`*.proc`): stopped, or short of memory or descriptors.",
    ),
    Reason.DRAIN_STALLED: Advice(
        "what was asked to end, or an engine that was asked to drain, did not within more time than that may take",
        "Read its stack; what it was finishing is lost, and its clients have been sent elsewhere or told.",
    ),
    GatewayReason.TOKENIZER_STUCK: Advice(
        "a prompt has been in the gateway's tokenizer pool far longer than its length explains",
        "Read the stacks of the gateway's pool threads; keep the prompt, if you may, to reproduce it.",
    ),
    Reason.START_STALLED: Advice(
        "a start loads nothing further: no bytes of weights, no thread that begins",
        "Look at the disk or network that holds the model, and at the process that is absent in the table of threads.",
    ),
    Reason.START_FAILED: Advice(
        "a supervisor could not begin its work: no memory for the pools, or its probe port is taken",
        "The message has the system's error: free the port or name another (`ports.probe`), or give less memory.",
    ),
    Reason.SUPERVISOR_FAILED: Advice(
        "the supervisor itself met an error that it does not know, such as a recorder that a process has written over",
        "Read the traceback (`about.json`, and the service's log). A defect of Sluice: report it with the bundle.",
    ),
    EngineReason.STEP_DIVERGENCE: Advice(
        "a rank was handed a step record that does not follow from the one before, and refused it",
        "Memory or the socket changed bytes, or two builds were mixed. Check the memory; report it with the bundle.",
    ),
    EngineReason.MEMORY_CORRUPT: Advice(
        "several closed cache records of the engine changed by themselves within ten minutes",
        "Test the machine's memory (or the device's ECC counters); look for what else writes into the engine's memory.",
    ),
    EngineReason.LEADER_DEAD: Advice(
        "the leader's process has ended",
        "Its last words and the log name the error; -9 is most often the kernel's memory killer (`dmesg`).",
    ),
    EngineReason.SIDECAR_DEAD: Advice(
        "the transport sidecar has died too often within a minute, or could not start",
        "Read the service's log: NIXL or a lane of it is missing or fails. `--transport stream` serves without it.",
    ),
    GatewayReason.GATEWAY_DEAD: Advice(
        "the gateway's process has ended",
        "Its log names the error; -9 is most often the kernel's memory killer (`dmesg`).",
    ),
    EngineReason.ZYGOTE_DEAD: Advice(
        "the process that all ranks are forked from has ended, and the ranks with it",
        f"{_RESTART}; when it comes back again and again, look at its log and at the memory of the machine.",
    ),
    Reason.THREAD_DEAD: Advice(
        "a watched thread's loop has ended while its process lives",
        "A defect: the row says what it was doing, the service's log has the traceback. Report it with the bundle.",
    ),
}


def advice_on(reason: str) -> Advice | None:
    """None for a reason that a process gave in its own words."""
    return ADVICE.get(reason)


def render_table() -> str:
    """Markdown, for docs/health.md."""
    lines = ["| reason | what it means | what to do |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| `{reason}` | {told.meaning} | {told.remedy} |" for reason, told in ADVICE.items())])
