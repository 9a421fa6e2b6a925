"""Run `mlx_tq.chat`: read a message, stream the answer to stdout, and show on stderr what the cache holds."""

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from mlx_lm.sample_utils import make_sampler

from mlx_tq.cli.inputs import read_share
from mlx_tq.cli.loading import apply_cache_source, join_ranks, load_model, open_prefix_folder, state_storage
from mlx_tq.cli.options import PENALTIES, RESCUE_FIELDS, SAMPLING, Option, Request, name_of
from mlx_tq.cli.runner import DONE, INTERRUPTED
from mlx_tq.cli.sampling_settings import choose_sampling, make_processors, parse_setting
from mlx_tq.cli.screen import (
    collect_stats,
    describe_drafts,
    describe_size,
    human_bytes,
    memory_bar,
    note,
    prefill_progress,
    show_lookup,
    show_plan,
    show_ranks,
    show_restored,
    show_shadow,
    stderr,
    stdout,
    table,
    warn,
)
from mlx_tq.cli.terminal_text import readable, write_answer
from mlx_tq.config import RescueConfig
from mlx_tq.distributed.group import Ranks
from mlx_tq.errors import ConfigError, MlxTqError, RankError, one_line, unknown_name
from mlx_tq.prompt_cache.cache_file import check_config, with_formats
from mlx_tq.prompt_cache.run_summary import RunSummary
from mlx_tq.prompt_cache.warm_up import compile_kernels
from mlx_tq.rescue import AUTO, OFF, START_S
from mlx_tq.session import Session
from mlx_tq.session.restore import take_archive_warning

readline: Any = None
with suppress(ImportError):  # not on every system; without it lines cannot be edited
    import readline  # gives input() its history and editing

    readline.set_auto_history(False)  # the chat adds whole messages
    if "libedit" not in (readline.__doc__ or ""):  # libedit has another syntax, and no bracketed paste
        readline.parse_and_bind("set enable-bracketed-paste on")  # what is pasted is one message, with all its lines

_DEFAULT_CONTEXT = 32768  # tokens at which the bytes of a model without a limit are shown
_BLOCK = '"""'
# What /set changes.
_SETTINGS = {
    option.flag.removeprefix("--"): option
    for option in (
        *(*SAMPLING, *PENALTIES),
        Option("--max-tokens", "N", int, "maximum tokens per answer", 512),
        Option("--seed", "N", int, "random seed", 0),
    )
}
_HELP = f"""\
/stats        show tokens and memory
/save FILE    save this conversation
/load FILE    load a saved conversation
/reset        start a new conversation
/system TEXT  start a new conversation with this system prompt
/undo         remove the last message and its answer
/compact P%   keep this share of the conversation's rows, to ask about a document
/retry        remove the last answer and ask again
/set          show the settings of sampling
/set NAME X   change one, such as /set temp 0.7
/help         show this help
/quit         exit (so does Ctrl-D)
 /...         to send a message that starts with /, put a space first
{_BLOCK}           begins and ends a message of several lines
Ctrl-C        stop the answer; press twice at the prompt to exit

The bar is the model's context: █ tokens in the cache, ▒ evicted tokens, · free"""


def run_chat(request: Request) -> int:
    args, config, ranks = request.args, request.config, join_ranks(request)
    rescue = request.rescue if ranks.is_first else RescueConfig(service=OFF)  # the first one searches for all
    if args.load is not None:
        apply_cache_source(args, args.load)
    states = state_storage(request)
    model, tokenizer = load_model(args, config, ranks=ranks)
    settings, sampling_line = choose_sampling(args, args.model)
    settings |= {"max_tokens": args.max_tokens, "seed": args.seed}
    warnings: list[str] = []
    with Session(
        model,
        tokenizer,
        config,
        rescue=rescue if config.evict or any(request.values[flag] is not None for flag in RESCUE_FIELDS) else None,
        system_prompt=args.system_prompt,
        template=args.chat_template_config,
        max_tokens=args.max_tokens,
        prefill_step_size=args.prefill_step_size,
        seed=args.seed,
        prefix_cache=open_prefix_folder(request, ranks),
        state_format=states.format,
        state_step=states.step,
        shadow=request.shadow,
        prompt_lookup=args.prompt_lookup,
        on_full=args.on_full,
        warn=warnings.append,
    ) as session:
        if args.load is not None:
            session.load(args.load)
            if request.changes_cache:  # flags can only repeat what the conversation was saved with
                check_config(args.load, session.config, with_formats(model, request.change(session.config)))
        compile_kernels(model, session.plan, lengths=session.lookup_mode.compiled_lengths)
        chat = Chat(session, settings, warnings, ranks)
        chat.show_conversation()
        note(sampling_line)
        if session.rescue.service == AUTO and session.client is not None:
            session.client.ready(START_S)
        note("type a message; /help shows the commands")
        code = chat.run()
        if session.shadow is not None:
            show_shadow(session.shadow.report(), session.shadow.native_dtype)
        return code


class Chat:
    """A session in a terminal, or with lines from a pipe; of several ranks the first one reads the input."""

    def __init__(self, session: Session, settings: dict[str, Any], warnings: list[str], ranks: Ranks) -> None:
        self._session, self._settings, self._warnings, self._ranks = session, settings, warnings, ranks
        self._apply_settings()
        self._is_terminal = sys.stdin.isatty()
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are not text cost their line, not the chat
        self._commands: dict[str, Callable[[str], None]] = {
            "/stats": self._show_stats,
            "/save": self._save,
            "/load": self._load,
            "/reset": self._reset,
            "/system": self._restart_with_system_prompt,
            "/undo": self._undo,
            "/compact": self._compact,
            "/retry": self._retry,
            "/set": self._set,
            "/help": lambda _: stderr.print(_HELP, markup=False),
        }

    def run(self) -> int:
        """Answer messages until the input ends; return the exit code: 0, or 130 for Ctrl-C."""
        was_pressed = False
        while True:
            try:
                message = self._ranks.broadcast_when_ready(self._next_message)
                was_pressed = False
            except KeyboardInterrupt:
                if was_pressed or not self._is_terminal:
                    return INTERRUPTED
                was_pressed = True
                stderr.print("\nPress Ctrl-C again to exit", style="dim")
                continue
            if message is None or message[0].strip() in ("/quit", "/exit"):
                return DONE
            try:
                self._handle(*message)
            except KeyboardInterrupt:
                if not (self._is_terminal and self._ranks.is_alone):
                    raise
                stderr.print("\nInterrupted", style="dim")

    def _next_message(self) -> tuple[str, bool] | None:
        """Return the next message and whether it is a command; None at the end of the input."""
        lines: list[str] | None = None
        try:
            message = self._read_line("> ")
            if message.strip() == _BLOCK:
                lines = []
                while (line := self._read_line("| ")).strip() != _BLOCK:
                    lines.append(line)
                message = "\n".join(lines)
        except EOFError:
            if lines is not None:
                count = len(lines)
                warn(f"the input ended before the {_BLOCK} that ends a message: its {count} lines were not sent.")
            return None
        self._remember(message)
        name = message.strip().partition(" ")[0]
        is_path = "/" in name[1:] or os.path.exists(name)  # noqa: PTH110  Path.exists raises for long names
        return message, message.startswith("/") and "\n" not in message and not is_path

    def _handle(self, message: str, is_command: bool) -> None:
        """Answer a message or run a command; an error ends that, and not the chat."""
        try:
            if is_command:
                name, _, argument = message.strip().partition(" ")
                if name not in self._commands:
                    valid = ", ".join([*self._commands, "/quit"])
                    hint = "To send a message that starts with /, put a space first."
                    raise ConfigError(f"unknown command {name}; valid are {valid}. {hint}")
                self._commands[name](argument.strip())
            elif message.strip():
                self._answer(message)
        except RankError:
            raise
        except MlxTqError as error:
            warn(str(error))
        while self._warnings:
            warn(self._warnings.pop(0))

    def _answer(self, message: str) -> None:
        turns = len(self._session.turns)
        try:
            stops = _stop_on_ctrl_c(self._session) if self._ranks.is_alone else nullcontext()
            with stops, prefill_progress() as progress:
                for piece in self._session.respond(message, progress=progress):
                    write_answer(piece)
        except KeyboardInterrupt:  # the second one in a turn
            if not self._ranks.is_alone:  # ranks may be at different tokens
                raise
        write_answer("\n")
        if len(self._session.turns) > turns:
            turn = self._session.turns[-1]
            show_restored(turn, can_recall=turn.archived > 0)
            note(
                f"prompt {turn.prompt_tokens:,} tokens, generated {turn.generation_tokens:,} tokens at "
                f"{turn.generation_tps:.1f} tok/s ({turn.finish_reason}){describe_drafts(turn)}"
            )
        else:
            note("interrupted before the answer: the message was removed")
        if self._session.plan is not None and len(self._session.turns) == 1:
            note(str(RunSummary.of(self._session.plan, self._session.stats.tokens)))
        stderr.print(memory_bar(self._session))

    def _read_line(self, prompt: str) -> str:
        if self._is_terminal:
            return input(prompt)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def _remember(self, message: str) -> None:
        """Add a message to the history, with all of its lines."""
        if readline is None or not self._is_terminal or not message.strip():
            return
        count = readline.get_current_history_length()
        if not count or readline.get_history_item(count) != message:
            readline.add_history(message)

    def _save(self, path: str) -> None:
        self._session.save(self._check_path(path, "/save"))
        note(f"saved to {path}")

    def _load(self, path: str) -> None:
        self._session.load(self._check_path(path, "/load"))
        self.show_conversation()
        stderr.print(memory_bar(self._session))

    def _check_path(self, path: str, command: str) -> Path:
        if not self._ranks.is_alone:
            raise ConfigError(
                f"{command} is for one process: each of {self._ranks.size} ranks has a part of the cache."
            )
        if not path:
            raise ConfigError(f"{command} needs a file, such as {command} chat.safetensors.")
        try:
            return Path(path).expanduser()
        except RuntimeError as error:
            raise ConfigError(f"{command} {path}: {one_line(error)}. Write the folder itself.") from error

    def _reset(self, _: str) -> None:
        self._session.reset()
        note("started a new conversation")

    def _restart_with_system_prompt(self, text: str) -> None:
        if not text:
            raise ConfigError("/system needs a text, such as /system Answer in one sentence.")
        self._session.reset(text)
        note("started a new conversation with this system prompt")

    def _undo(self, _: str) -> None:
        self._remove_last_turn()
        note("removed the last message and its answer")
        stderr.print(memory_bar(self._session))

    def _compact(self, share: str) -> None:
        stops = _stop_on_ctrl_c(self._session) if self._ranks.is_alone else nullcontext()
        with stops, prefill_progress(title="Compacting") as progress:
            self._session.compact(read_share("/compact", share), progress)
        note(f"kept {share} of the conversation's rows")
        stderr.print(memory_bar(self._session))

    def _retry(self, _: str) -> None:
        message = self._remove_last_turn()
        if self._settings["temp"] == 0:
            note("temp is 0, so the same answer is likely; /set temp 0.7 allows others")
        self._answer(message)

    def _remove_last_turn(self) -> str:
        stops = _stop_on_ctrl_c(self._session) if self._ranks.is_alone else nullcontext()
        with stops, prefill_progress(title="Prefilling the conversation") as progress:
            return self._session.undo(progress)

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if not name:
            shown = table("", "setting", "value")
            for flag, option in _SETTINGS.items():
                shown.add_row(flag, f"{self._settings[name_of(option.flag)]}")
            stdout.print(shown)
            return
        if name not in _SETTINGS:
            raise unknown_name("setting", name, _SETTINGS)
        if not value:
            raise ConfigError(f"/set {name} needs a value; /set alone lists the current settings.")
        option = _SETTINGS[name]
        parsed = parse_setting(option, value.strip())
        if name == "seed":
            self._session.seed(parsed)
        self._settings[name_of(option.flag)] = parsed
        self._apply_settings()
        note(f"{name} is {parsed}")

    def _apply_settings(self) -> None:
        session, now = self._session, self._settings
        top_k = now["top_k"] if now["top_k"] < session.tokenizer.vocab_size else 0  # mlx-lm refuses more
        sampler = make_sampler(now["temp"], now["top_p"], now["min_p"], top_k=top_k)
        session.sampler = self._ranks.share_sampler(sampler)
        session.logits_processors, session.max_tokens = make_processors(now), now["max_tokens"]

    def show_conversation(self) -> None:
        """Show how the cache is stored, and the last question and answer of a loaded conversation."""
        session = self._session
        if session.plan is not None:
            recall_blocker = None if session.shadow is None else "--kv-shadow"
            show_plan(session.plan, session.context_length or _DEFAULT_CONTEXT, recall_blocker)
        show_lookup(session.lookup_mode.blocker(session.model, session.cache))
        if session.client is not None:
            note(f"rescue: {session.rescue.service}")
        if session.last_exchange is not None:
            if session.num_turns > 1:
                note(f"conversation of {session.num_turns:,} turns, {session.stats.tokens:,} tokens; the last one:")
            question, answer = map(readable, session.last_exchange)
            stderr.print(f"> {question}\n{answer}", markup=False)

    def _show_stats(self, _: str) -> None:
        session, stats = self._session, self._session.stats
        size = describe_size(stats)
        if stats.is_comparable and stats.ratio > 1:
            size += f" ({stats.ratio:.1f}x)"
        rows = {
            "turns": f"{session.num_turns:,}",
            "tokens": f"{stats.tokens:,}" + (f" of {session.context_length:,}" if session.context_length else ""),
            "live": f"{stats.live:,}",
            "evicted": f"{stats.evicted:,}",
            "archived": f"{stats.archived:,} in {human_bytes(stats.archived_nbytes)}",
            "dropped": f"{stats.dropped:,}",
            **({"recalled in the last turn": f"{session.recalled_tokens:,}"} if stats.archived else {}),
            "rescued": f"{session.quoted_tokens:,}",
            **({"in removed turns": f"{session.removed_tokens:,}"} if session.removed_tokens else {}),
            "KV cache": size,
        }
        if session.client is not None:
            rescue = session.client.stats
            lost = rescue.dropped + rescue.refused
            rows["rescue spans"] = f"{rescue.written:,} written, {rescue.queued:,} queued, {lost:,} lost"
            rows["rescue searches"] = f"{rescue.queries:,}, {rescue.unanswered:,} unanswered"
        shown = table("", "conversation", readable(session.session_id[:8]))
        for name, value in rows.items():
            shown.add_row(name, value)
        stdout.print(shown)
        if not self._ranks.is_alone:
            show_ranks(collect_stats(self._ranks, stats, take_archive_warning(session.cache)))


@contextmanager
def _stop_on_ctrl_c(session: Session) -> Iterator[None]:
    """Let Ctrl-C end the answer after its next token, and a second one immediately."""
    was_pressed = False

    def stop(*_: object) -> None:
        nonlocal was_pressed
        if was_pressed:
            raise KeyboardInterrupt
        was_pressed = True
        session.stop()

    previous = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
