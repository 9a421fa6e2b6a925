"""Ctrl-C and readers that leave: real processes, real signals."""

import io
import json
import os
import select
import signal
import sys
import time

import pytest

from mlx_tq.cli import main

from .tools import LIMIT, PACKED, facts

# Goes on until the model's positions end.
STORY = ("--ignore-chat-template", "-p", "The history of the city", "-m", 3000, "--temp", "1", "--seed", "5")

SHOW_CURSOR = b"\x1b[?25h"  # what the progress bar writes when it goes


def read_until(stream, mark):
    """What a pipe or terminal says up to and including `mark`; fails when it ends or takes too long."""
    said, deadline = b"", time.monotonic() + LIMIT
    while mark not in said:
        ready, _, _ = select.select([stream], [], [], max(0, deadline - time.monotonic()))
        assert ready, f"no {mark!r} in {said!r}"
        more = os.read(stream if isinstance(stream, int) else stream.fileno(), 65536)
        assert more, f"no {mark!r} in {said!r}"
        said += more
    return said.decode(errors="replace")


def test_in_generation_the_text_is_kept(start):
    process = start("generate", *STORY, *PACKED)
    said = read_until(process.stdout, b" ")
    process.send_signal(signal.SIGINT)
    rest, err = (part.decode(errors="replace") for part in process.communicate(timeout=LIMIT))
    text = said + rest
    assert process.returncode == 130
    assert text.endswith("\n")
    assert text.strip()
    assert "Traceback" not in err
    count = int(err.split("generation: ")[1].split(" tokens")[0].replace(",", ""))
    assert 0 < count < 3000
    assert "tok/s (interrupted)" in err
    assert "KV cache: " in err
    assert "peak memory: " in err


def test_json_is_whole(start):
    terminal, other_end = os.openpty()
    process = start("generate", *STORY, *PACKED, "--json", stderr=other_end)
    os.close(other_end)
    said = read_until(terminal, SHOW_CURSOR)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=LIMIT)
    os.close(terminal)
    answer = json.loads(out)
    assert process.returncode == 130
    assert set(answer) == {"text", "stats", "plan"}
    assert answer["stats"]["finish_reason"] == "interrupted"
    assert (answer["text"] == "") == (answer["stats"]["generation_tokens"] == 0)
    assert answer["stats"]["generation_tokens"] < 3000
    assert "reading the prompt" in said


@pytest.mark.parametrize("json_flag", [(), ("--json",)], ids=["text", "json"])
def test_in_prefill(start, json_flag):
    """The progress bar of a terminal says that the prompt is being read; Ctrl-C then ends it, with statistics."""
    text, question = facts(180)
    terminal, other_end = os.openpty()
    process = start("generate", "-p", text + question, *PACKED, "--prefill-step-size", 16, *json_flag, stderr=other_end)
    os.close(other_end)
    said = read_until(terminal, b"reading the prompt")
    process.send_signal(signal.SIGINT)
    said += read_until(terminal, b"" if json_flag else b"peak memory")
    out, _ = process.communicate(timeout=LIMIT)
    os.close(terminal)
    assert process.returncode == 130
    assert "Traceback" not in said
    if json_flag:
        stats = json.loads(out)["stats"]
        assert (stats["finish_reason"], stats["generation_tokens"]) == ("interrupted", 0)
        assert json.loads(out)["text"] == ""
    else:
        assert out == b"\n"
        assert "interrupted before the first token" in said


def test_while_caching_a_prompt(start, tmp_path):
    """Nothing half written."""
    text, _ = facts(180)
    file = tmp_path / "cache.safetensors"
    process = start("cache_prompt", "-p", text, "--prompt-cache-file", file, "--prefill-step-size", 16)
    read_until(process.stderr, b"in the model's own type")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_while_waiting_for_standard_input(monkeypatch, capsys):
    class Terminal(io.StringIO):
        def read(self, *_):
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Terminal())
    assert main(["generate", "-p", "-"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("words", [("--help",), ("--version",), ("generate", "--help"), ("generate", "-p", "hi")])
def test_nobody_reads(start, words):
    """`mlx_tq ... | true` is no reason for a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    process = start(*words, stdout=writer)
    os.close(writer)
    _, err = process.communicate(timeout=LIMIT)
    assert b"Traceback" not in err
    assert b"Exception" not in err
    assert b"Broken" not in err
    assert process.returncode in (0, 1)  # argparse does not mind that nobody reads its help


def test_reader_leaves(start):
    """`mlx_tq.generate ... | head -c 10`."""
    process = start("generate", *STORY)
    read_until(process.stdout, b" ")
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=LIMIT) == 1
    assert b"Traceback" not in err
    assert b"Exception" not in err
    assert b"Broken" not in err
