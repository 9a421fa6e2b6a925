"""`mlx_tq.chat` with lines from a pipe, and in a terminal with real signals."""

import io
import json
import os
import re
import readline
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli.tools import FLOAT32, command, copy_model, environment, zoo_model
from http_harness import wait_for
from processes import hangup_set_to, read_until
from rescue.harness import Server

from mlx_tq import __main__
from mlx_tq.cli.screen import memory_bar
from mlx_tq.prompt_cache.statistics import CacheStats

REPEAT_S = 2  # seconds until Ctrl-C is pressed again
END_S = 60  # longer, because another Ctrl-C kills a program that is ending
PRESSES = 10


@pytest.fixture
def talk(tmp_path, capsys, monkeypatch):
    """Return a function that runs `mlx_tq chat` with lines from a pipe, and returns stdout and stderr."""

    def call(*lines, words=()):
        text = "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))
        monkeypatch.chdir(tmp_path)
        assert __main__.main(["chat", *FLOAT32, *words]) == 0
        return capsys.readouterr()

    return call


def test_a_conversation_from_a_pipe(talk, tmp_path):
    (tmp_path / "broken.safetensors").write_bytes(bytes(20))
    (tmp_path / "thesis.txt").write_text("thesis")
    message = ('"""', "Two lines.", "What is the access code?", '"""')
    files = ("/save chat.safetensors", "/save thesis.txt", "/save chat.safetensors", "/reset", "/load chat.safetensors")
    faults = ("/compact", "/save", "/nope", "\udcff\udcfe hi", "/load broken.safetensors", "/load nowhere.safetensors")
    faults += (f"/save {300 * 'x'}", f"/load {300 * 'x'}")
    words = ("The access code is 417295.", *message, *files, "What is the access code?", *faults, "/stats")
    out, err = talk(*words, 40 * "日本語", 300 * "x")  # neither is the name of a file
    answers, _, stats = out.partition("conversation")
    assert [line.rstrip() for line in answers.splitlines()[1:3]] == ["417295", "417295"]
    assert "of 4,096" in stats
    assert re.search(r"^turns +3$", stats, re.MULTILINE), stats  # two of them before the reload
    for words in (
        "saved to chat.safetensors",
        "started a new conversation",
        "/compact is ''; write a share of the rows, such as 25%",
        "/save needs a file",
        "unknown command /nope; valid are /stats",
        "there is no saved conversation nowhere.safetensors",
        "File name too long",
        "the message is not UTF-8 text",
        "([load_safetensors]",
        " live  0 evicted  0 rescued",
        "Sampling: temp 0, greedy (default)",
    ):
        assert words in err
    assert "thesis.txt is not a conversation and is not replaced" in " ".join(err.split())
    assert (tmp_path / "thesis.txt").read_text() == "thesis"


def test_a_shadow_is_reported_at_the_end(talk):
    words = ("--kv-sinks", "16", "--kv-window", "16", "--kv-normalize", "off", "--max-tokens", "8")
    _, err = talk("The access code is 417295. " * 8, "/save chat.safetensors", words=(*words, "--kv-shadow", "2"))
    assert "Shadow mode: the compressed cache against mlx-lm's float32 cache in " in err
    assert "Next token, " in err
    assert "cannot be saved" in err


def test_an_unfinished_message_is_reported(talk):
    out, err = talk('"""', "Two lines,", "and no end.")
    assert out == ""
    assert "its 2 lines were not sent" in err


def test_paths_and_the_last_exchange_of_a_loaded_conversation(talk, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    question = "/etc/hosts is a file. The access code is 417295. What is the access code?"
    out, err = talk(question, "/tmp is a folder.", " /nope", "/save ~/chat.safetensors", "/save ~nobody-here/x")
    assert len(out.splitlines()) >= 3
    assert "unknown command" not in err
    assert "nobody-here" in err
    out, err = talk("Go on.", words=("--load", str(tmp_path / "chat.safetensors")))
    before, _, _ = err.partition("type a message")
    assert "> /nope\n" in before.replace(">  /", "> /")
    out, err = talk(question, "/save here", "/reset", "/load here")
    assert f"> {question}\n417295" in err


def test_flags_that_contradict_a_loaded_conversation_are_refused(talk, capsys):
    evicts = ("--kv-evict", "recency", "--kv-budget", "50%", "--rescue", "off")
    talk("hi", "/save here", words=evicts)
    load = ("--load", "here")
    for words in ((), evicts, ("--kv-window", "128", "--rescue", "off")):
        assert talk(words=(*load, *words)).out == ""
    for words, says in (
        (("--kv-profile", "small"), "made with another configuration: key is 'q8', not 'stcq4'"),
        ((*evicts[:3], "25%"), "made with another configuration: evict is"),
        (("--system-prompt", "Be brief."), "--system-prompt cannot be combined with --load"),
    ):
        assert __main__.main(["chat", *FLOAT32, *load, *words]) > 0
        assert says in capsys.readouterr().err


def test_a_loaded_conversation_brings_its_model(talk, tmp_path, capsys, monkeypatch):
    model, file = copy_model(tmp_path / "model"), tmp_path / "chat.safetensors"
    question = "What is the access code?"
    talk("The access code is 417295.", "/save chat.safetensors", words=("--model", "model"))
    load = ["chat", "--load", str(file)]
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{question}\n"))
    assert __main__.main(load) == 0
    assert capsys.readouterr().out == "417295\n"
    (model / "model.safetensors").unlink()
    other = zoo_model(tmp_path / "other", "llama")
    made = f"{file} was made with --model {model} and --dtype float32, not with "
    for flags, code, says in (
        (("--dtype", "bfloat16"), 2, f"{made}--dtype bfloat16. Drop that flag"),
        (("--model", str(other)), 2, f"{made}--model {other}. Drop that flag"),
        ((), 2, "No safetensors found"),
    ):
        assert __main__.main([*load, *flags]) == code
        assert says in capsys.readouterr().err
    assert __main__.main(["chat", "--load", "none"]) == 1
    assert "there is no saved conversation none. Make one with /save in mlx_tq.chat." in capsys.readouterr().err


def test_commands_change_the_conversation_and_its_sampling(talk):
    question = "The access code is 417295. What is the access code?"
    commands = ("/undo", "/set temp warm", "/set speed 3", "/set top-k", "/set top-p 7", "/set max-tokens 0", "/system")
    out, err = talk(
        *(*commands, question, "The access code is 123456.", "/undo", "What is the access code?", "/retry"),
        *("/set max-tokens 1", "/retry", "/set temp 50", "/set seed 3", "/set top-k 99999", "/set", "/stats"),
        *("/system The access code is 999888.", "/set temp 0", "/set max-tokens 12", "What is the access code?"),
    )
    for words in (
        "there is nothing to undo",
        "'warm' is not a temperature",
        "setting 'speed' is unknown; valid are temp, top-p",
        "/set top-k needs a value",
        "--top-p is 7.0; it must be from 0 to 1",
        "--max-tokens is 0; it must be 1 or more",
        "/system needs a text",
        "the same answer is likely",
        "generated 1 tokens",
        "started a new conversation with this system prompt",
    ):
        assert words in err
    lines = [line.strip() for line in out.splitlines()]
    assert lines.count("417295") >= 3
    assert lines[-1] == "999888"
    shown = dict(line.split() for line in lines if line.startswith(("temp ", "top-k ", "seed ", "turns ")))
    assert shown == {"temp": "50.0", "top-k": "99999", "seed": "3", "turns": "2"}


def test_the_sampling_of_the_model_is_used_where_no_flag_is_given(talk, tmp_path):
    model, question = copy_model(tmp_path / "model"), "The access code is 417295. What is the access code?"
    config = {"do_sample": True, "temperature": 60, "top_p": 1, "top_k": "x", "min_p": None, "repetition_penalty": 1.1}
    config["presence_penalty"] = 1.5
    (model / "generation_config.json").write_text(json.dumps(config))
    words = ("--model", str(model), "--max-tokens", "8")
    out, err = talk(question, words=words)
    assert "417295" not in out
    line = "Sampling: {}top-p 1, repetition-penalty 1.1, presence-penalty 1.5 (generation_config.json)"
    assert line.format("temp 60, ") in err
    assert "generation_config.json of the model: top-k is '\"x\"'; it must be a whole number. It is not used." in err
    out, err = talk(question, words=(*words, "--temp", "0", "--top-k", "5"))
    assert "417295" in out
    assert line.format("temp 0, greedy, top-k 5 (from flags); ") in err
    config = {"do_sample": False, "temperature": 60}
    (model / "generation_config.json").write_text(json.dumps(config))
    assert "Sampling: temp 0, greedy (generation_config.json)" in talk(words=words).err


needs_readline = pytest.mark.skipif("libedit" in (readline.__doc__ or ""), reason="this Python has libedit")


def start_in_terminal(popen, *words, **options):
    """Start a chat in a terminal; return its process, and the other end of the terminal."""
    ours, theirs = os.openpty()
    process = popen(command("chat", *words), stdin=theirs, stdout=theirs, stderr=theirs, env=environment(), **options)
    os.close(theirs)
    return process, ours


def test_the_model_is_named_before_slow_imports_and_ctrl_c_ends_them(popen):
    process, ours = start_in_terminal(
        popen, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    )
    read_until(ours, "Loading needle")
    maps = Path(f"/proc/{process.pid}/maps")
    assert not maps.exists() or "/tokenizers" not in maps.read_text()  # a library that mlx-lm imports
    process.send_signal(signal.SIGINT)
    assert process.wait(END_S) == 130
    shown = ""
    with suppress(OSError):  # at the end of a terminal
        while more := os.read(ours, 65536):
            shown += more.decode()
    assert "Traceback" not in shown
    os.close(ours)


@pytest.mark.full
@needs_readline
def test_up_recalls_a_message_of_several_lines(popen):
    _, ours = start_in_terminal(popen, "--max-tokens", "4")
    read_until(ours, "> ")
    for line in ('"""', "The access code is 417295.", "It is new.", '"""'):
        os.write(ours, f"{line}\r".encode())
    first = read_until(ours, " rescued", read_until(ours, "prompt "))
    os.write(ours, b"\x1b[A\r")
    second = read_until(ours, " rescued", read_until(ours, "prompt "))
    os.write(ours, b"/stats\r")
    shown = read_until(ours, "KV cache")
    tokens = [int(text.rpartition("prompt ")[2].split()[0]) for text in (first, second)]
    assert abs(tokens[1] - tokens[0]) < 10  # of the template
    assert shown.partition("turns")[2].split()[0] == "2"


@pytest.mark.full
def test_a_full_conversation_removes_its_oldest_turns(talk, tmp_path):
    model = copy_model(tmp_path / "model", max_position_embeddings=300)
    words = ("--model", str(model), "--max-tokens", "8", "--on-full", "drop-oldest", "--kv-evict", "recency")
    text = "The history of the city is long. "
    out, err = talk(
        *("The access code is 417295.", *(f"{text * 8}{number}" for number in range(4)), "/save chat.safetensors"),
        *("What is the access code?", "/undo", "/stats"),
        words=(*words, "--rescue-timeout", "60", "--kv-sinks", "16", "--kv-window", "16"),
    )
    assert "the context of 300 tokens was full: the oldest " in err
    assert " tokens) were removed; a search still finds their text." in err
    assert "was prefilled again, and the counts of live and evicted tokens start at zero" in err
    assert re.search(r"rescued +\d", out)
    assert "in removed turns" in out
    assert "417295" in out
    assert "Traceback" not in err


@pytest.mark.full
@needs_readline
def test_a_paste_is_one_message(popen):
    """A terminal marks a paste, which libedit does not know; Enter ends the message."""
    _, ours = start_in_terminal(popen, "--max-tokens", "8")
    assert "\x1b[?2004h" in read_until(ours, "> ")  # asks the terminal for the marks
    os.write(ours, b"\x1b[200~The access code is 417295.\nIt is new.\nWhat is the access code?\x1b[201~")
    os.write(ours, b"\r")
    shown = read_until(ours, "generated")
    os.write(ours, b"/stats\r")
    shown += read_until(ours, "KV cache")
    assert shown.partition("turns")[2].split()[0] == "1"


def test_a_conversation_to_its_last_position(talk, tmp_path):
    model = copy_model(tmp_path / "model", max_position_embeddings=400)
    long = ("word " * 330, "word " * 25, "word " * 500)
    out, err = talk(
        *("The access code is 417295.", *long, "/save chat.safetensors", "/reset"),
        "The access code is 417295. What is the access code?",
        words=("--model", str(model), "--max-tokens", "8"),
    )
    assert err.count("of the model's 400 positions. It ends when") == 1
    assert "of the model's 400 positions are free (evicted tokens keep theirs)" in err
    assert "Shorten the turn, start a new conversation (reset)" in err
    assert "characters). Shorten the message, start a new conversation (reset)" in err
    assert "saved to chat.safetensors" in err
    assert out.splitlines()[-1].strip() == "417295"
    assert "indexing errors" not in err  # transformers' warning about long texts


def read_all(terminal):
    """Return what a terminal shows until it shows nothing new, or its program has ended."""
    shown = ""
    with suppress(OSError):
        while select.select([terminal], [], [], REPEAT_S)[0]:
            shown += os.read(terminal, 65536).decode(errors="replace")
    return shown


def has_ended(process):
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    return process.returncode is not None


@pytest.mark.full
def test_a_long_message_shows_a_progress_bar(talk, popen):
    words, message = ("--prefill-step-size", "16", "--max-tokens", "4"), "The history of the city. " * 30
    assert "reading" not in talk(message, words=words).err
    ours, theirs = os.openpty()
    moving = popen(command("chat", *words), stdin=subprocess.PIPE, stdout=-1, stderr=theirs, env=environment())
    os.close(theirs)
    moving.stdin.write(f"{message}\n".encode())
    moving.stdin.close()
    assert "Prefilling" in read_until(ours, "tok/s", read_until(ours, "help shows"))
    read_until(ours, " rescued")
    os.close(ours)


@pytest.mark.full
def test_ctrl_c_stops_a_turn_and_keeps_the_session(popen):
    """Ctrl-C at the prompt is repeated if nothing happens.

    Python may notice a signal just before readline's wait only after the next key or signal, and then both as one."""
    process, ours = start_in_terminal(
        popen,
        *("--max-tokens", "-1", "--temp", "1"),
        preexec_fn=lambda: (os.setsid(), signal.signal(signal.SIGINT, signal.default_int_handler)),
    )

    def press_until(happened):
        for _ in range(PRESSES):
            process.send_signal(signal.SIGINT)
            if happened():
                return
        raise AssertionError(f"{PRESSES} times Ctrl-C without effect")

    read_until(ours, "> ")
    os.write(ours, b"The access code is 417295.\n")
    read_until(ours, " rescued")
    os.write(ours, b"\xff\xfe\n")
    read_until(ours, "not UTF-8")
    os.write(ours, ("The history of the city. " * 60 + "\n").encode())
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    shown = read_until(ours, "interrupted")
    shown = read_until(ours, " rescued", shown)
    os.write(ours, b"What is the access code?\n")
    shown = read_until(ours, " rescued", read_until(ours, "417295"))
    read_until(ours, "> ", shown.rpartition("rescued")[2])
    press_until(lambda: "again to exit" in read_all(ours))
    press_until(lambda: has_ended(process))
    assert process.returncode == 130
    os.close(ours)


EVICTS = ("--kv-profile", "safe", "--kv-sinks", "16", "--kv-window", "32", "--kv-evict", "recency:granularity=16")
LONG = "The history of the city. " * 40
ENDLESS = ("--kv-budget", "64", "--prefill-step-size", "64", "--max-tokens", "3000", "--temp", "1")


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("rescue") / "data", embedder="none")
    yield made
    made.stop()


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("words", "answers"),
    [
        (("chat",), True),
        pytest.param(("chat", "--max-tokens", "8"), False, marks=pytest.mark.full),
        pytest.param(("generate", "-p", LONG), True, marks=pytest.mark.full),
    ],
    ids=["chat", "chat at its prompt", "generate"],
)
def test_a_signal_deletes_the_text_at_the_service(popen, service, words, answers, number):
    def stored():
        return service.http.get("/sessions").json()["sessions"]

    words = command(words[0], *EVICTS, *ENDLESS, *words[1:], "--rescue", service.url)
    with hangup_set_to(signal.SIG_DFL):
        process = popen(words, stdin=-1, stdout=-1, stderr=-1, env=environment())
    process.stdin.write(f"{LONG}\n".encode())
    process.stdin.flush()
    if not answers:
        read_until(process.stderr.fileno(), "tok/s")
    wait_for(stored)
    process.send_signal(number)
    _, err = process.communicate(timeout=END_S)
    assert (process.returncode, b"Traceback" in err) == (128 + number, False)
    assert not stored()


@pytest.mark.full
def test_an_ignored_signal_ends_nothing(popen):
    with hangup_set_to(signal.SIG_IGN):
        process = popen(command("chat", "--max-tokens", "8"), stdin=-1, stdout=-1, stderr=-1, env=environment())
    read_until(process.stderr.fileno(), "help shows")
    process.send_signal(signal.SIGHUP)
    process.stdin.write(b"The access code is 417295. What is the access code?\n")
    process.stdin.flush()
    assert "417295" in read_until(process.stdout.fileno(), "417295")
    process.communicate(timeout=END_S)
    assert process.returncode == 0


SIZE, NATIVE = " 22.8 MB", ", float32 cache 101.3 MB"
COUNTS = "  1,000 live  2,000 evicted  300 recalled  96 rescued  2,000 archived"


@pytest.mark.parametrize(
    ("width", "bar", "counts"),
    [
        (None, (10, 20, 10), NATIVE + COUNTS),
        (200, (10, 20, 10), NATIVE + COUNTS),
        (120, (5, 10, 5), NATIVE + COUNTS),
        (80, (5, 10, 5), NATIVE + "  1,000 live  2,000 evicted"),
        (44, (3, 6, 3), NATIVE),
        (32, (6, 12, 6), ""),
    ],
)
def test_the_memory_bar_fits_the_terminal(width, bar, counts):
    """Bytes are first, and what does not fit is left out as a whole."""
    stats = CacheStats(3000, 22_800_000, 101_300_000, "float32", 288, evicted=2000, archived=2000, recalled=300)
    session = SimpleNamespace(stats=stats, context_length=4000, recalled_tokens=300, quoted_tokens=96)
    text = memory_bar(session, width).plain
    assert len(text) <= (width or 200)
    cells = {cell: text.count(cell) for cell in "█▒·"}
    assert text == "".join(cell * count for cell, count in cells.items()) + SIZE + counts
    assert all(abs(count - wanted) <= 1 for count, wanted in zip(cells.values(), bar, strict=True))


def test_the_memory_bar_shows_what_is_dropped_and_compares_no_short_cache():
    stats = CacheStats(3000, 812_000, 9_300_000, "float32", 288, evicted=2000, archived=1500)
    session = SimpleNamespace(stats=stats, context_length=4000, recalled_tokens=0, quoted_tokens=96)
    counts = "1,000 live  2,000 evicted  500 dropped  0 recalled  96 rescued  1,500 archived"
    assert memory_bar(session).plain.endswith(f" 812.0 kB, float32 cache 9.3 MB  {counts}")
    session.stats = CacheStats(287, 812_000, 1_600_000, "float32", 288)
    assert memory_bar(session).plain.endswith(" 812.0 kB  287 live  0 evicted  96 rescued")
