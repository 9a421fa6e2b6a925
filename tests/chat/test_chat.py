"""`mlx_tq.chat` with lines from a pipe and in a terminal: real processes, real signals."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from mlx_tq import cli
from mlx_tq.chat.screen import memory_bar
from mlx_tq.models import embedded_path
from mlx_tq.session import SessionStats

ROOT = Path(__file__).parents[2]
LIMIT = 240  # seconds after which a process is taken for stuck
PATIENCE = 2  # seconds after which people press a key again
ENDING = 60  # a program that ends has given up its handler: another Ctrl-C then kills it
PRESSES = 10
COMMAND = [sys.executable, "-m", "mlx_tq", "chat"]


def environment():
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MLX_TQ_", "RESCUE_"))}
    return {**env, "PYTHONPATH": str(ROOT), "TERM": "xterm"}


def model_with_positions(tmp_path, count):
    """The folder of the embedded model, with another number of positions."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in embedded_path().iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((embedded_path() / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": count}))
    return str(folder)


def talk(*lines, words=(), cwd=None):
    done = subprocess.run(
        [*COMMAND, *words],
        input="\n".join(lines) + "\n",
        errors="surrogateescape",
        capture_output=True,
        text=True,
        env=environment(),
        cwd=cwd,
        timeout=LIMIT,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_conversation_from_a_pipe(tmp_path):
    """Answers on stdout, all else on stderr; lines in one message, bytes that are no text; saved, forgotten, loaded."""
    (tmp_path / "broken.safetensors").write_bytes(bytes(20))
    code, out, err = talk(
        "The access code is 417295.",
        '"""',
        "Two lines.",
        "What is the access code?",
        '"""',
        "/save chat.safetensors",
        "/reset",
        "/load chat.safetensors",
        "What is the access code?",
        "/save",
        "/nope",
        "\udcff\udcfe hi",
        "/load broken.safetensors",
        "/load nowhere.safetensors",
        "/stats",
        cwd=tmp_path,
    )
    assert code == 0
    answers, _, stats = out.partition("conversation")
    assert [line.rstrip() for line in answers.splitlines()[1:3]] == ["417295", "417295"]
    assert "of 4,096" in stats
    assert "saved to chat.safetensors" in err
    assert "the conversation is forgotten" in err
    assert "/save needs a file" in err
    assert "/nope is no command; valid are /stats" in err
    assert "there is no conversation nowhere.safetensors" in err
    assert "the message is not UTF-8 text" in err
    assert "([load_safetensors]" in err
    assert "Traceback" not in err
    assert " live  0 evicted  0 rescued" in err


def read_until(terminal, mark, said=""):
    """What a terminal shows up to `mark`; fails when it ends or takes too long."""
    deadline = time.monotonic() + LIMIT
    while mark not in said:
        ready, _, _ = select.select([terminal], [], [], max(0, deadline - time.monotonic()))
        assert ready, f"no {mark!r} in {said!r}"
        said += os.read(terminal, 65536).decode(errors="replace")
    return said


def read_all(terminal):
    """What a terminal shows until it shows nothing new for a while, or its program has ended."""
    said = ""
    with suppress(OSError):
        while select.select([terminal], [], [], PATIENCE)[0]:
            said += os.read(terminal, 65536).decode(errors="replace")
    return said


def has_ended(process):
    with suppress(subprocess.TimeoutExpired):
        process.wait(ENDING)
    return process.returncode is not None


def test_ctrl_c_stops_a_turn_and_keeps_the_session(popen):
    """A terminal of its own, so that Ctrl-C is a key.

    Where nothing follows one at the prompt it is pressed again, as people do: Python notices a signal that comes just
    before readline's wait for a key only after that key, or after the next signal, and then both as one.
    """
    ours, theirs = os.openpty()
    process = popen(
        [*COMMAND, "--max-tokens", "-1", "--temp", "1"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(),
        preexec_fn=lambda: (os.setsid(), signal.signal(signal.SIGINT, signal.default_int_handler)),
    )
    os.close(theirs)

    def press_until(happened):
        for _ in range(PRESSES):
            process.send_signal(signal.SIGINT)
            if happened():
                return
        raise AssertionError(f"{PRESSES} times Ctrl-C in vain")

    read_until(ours, "> ")
    os.write(ours, b"The access code is 417295.\n")
    read_until(ours, " rescued")
    os.write(ours, b"\xff\xfe\n")
    read_until(ours, "not UTF-8")
    os.write(ours, ("The history of the city. " * 120 + "\n").encode())
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    said = read_until(ours, "interrupted")
    said = read_until(ours, " rescued", said)
    os.write(ours, b"What is the access code?\n")
    said = read_until(ours, " rescued", read_until(ours, "417295"))
    read_until(ours, "> ", said.rpartition("rescued")[2])
    press_until(lambda: "once more leaves" in read_all(ours))
    press_until(lambda: has_ended(process))
    assert process.returncode == 130
    os.close(ours)


def test_a_conversation_to_its_last_position(tmp_path):
    """Said when it nears; then refused with the remedy, and what was said can still be saved and gone on with."""
    folder = model_with_positions(tmp_path, 400)
    code, out, err = talk(
        "The access code is 417295.",
        "word " * 330,
        "word " * 500,
        "/save chat.safetensors",
        "/reset",
        "The access code is 417295. What is the access code?",
        words=("--model", folder, "--max-tokens", "8"),
        cwd=tmp_path,
    )
    assert code == 0
    assert err.count("of the model's 400 positions; it ends there") == 1
    assert "the model has 400 positions, which evicted tokens keep. Start a new conversation (reset)" in err
    assert "saved to chat.safetensors" in err
    assert out.splitlines()[-1].strip() == "417295"
    assert "Traceback" not in err
    assert "indexing errors" not in err  # transformers' word for a text longer than the model's positions


def test_the_bar():
    stats = SessionStats(3, 3000, 1000, 2000, 96, 4000, 812_000, 9_300_000, None)
    text = memory_bar(stats).plain
    assert text == f"{'█' * 10}{'▒' * 20}{'·' * 10} 1,000 live  2,000 evicted  96 rescued  812.0 kB, fp16 9.3 MB"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--rescue", "5054"), "it must be off, auto or a URL"),
        (("--rescue-timeout", "0", "--rescue", "auto"), "timeout is 0.0"),
        (("--max-tokens", "0"), "--max-tokens is 0"),
        (("--kv-budget", "100"), "add --kv-evict"),
    ],
)
def test_what_cannot_be_met(words, says, capsys):
    assert cli.main(["chat", *words]) == 2
    assert says in capsys.readouterr().err
