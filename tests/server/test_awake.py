"""The machine stays awake while answers are generated. Another command stands in for macOS's."""

from contextlib import suppress
from pathlib import Path

from http_harness import wait_for

from mlx_tq.server import awake

from .engines import make_engine, make_job, outcome, serve


def test_the_command_runs_while_an_answer_is_generated_and_not_when_idle(loaded, monkeypatch):
    monkeypatch.setattr(awake, "COMMAND", ["/bin/sleep", "98765"])

    def is_awake():
        found = False
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):  # it has ended
                found |= path.read_bytes() == b"/bin/sleep\x0098765\0"
        return found

    async def then():
        engine.submit(job := make_job(40, max_tokens=60))
        await job.events.get()
        begun = is_awake()
        await outcome(job)
        wait_for(lambda: not is_awake(), 10)
        return begun

    engine = make_engine(loaded)
    assert serve(engine, [], then)[1]


def test_a_system_without_the_command_is_no_error(monkeypatch):
    monkeypatch.setattr(awake, "COMMAND", ["/nothing/caffeinate"])
    stay_awake = awake.StayAwake()
    stay_awake.begin()
    stay_awake.end()
