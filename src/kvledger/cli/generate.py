"""`kvledger generate`: a real model through the ledger.

Text goes to stdout while it comes, everything else to stderr. What is heavy to import (torch, transformers) comes in
when the command runs, so that --help is quick.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

import typer

from kvledger.cli.app import OptionsCommand, in_option_words
from kvledger.cli.generate_options import GenerateOptions
from kvledger.engine.load_options import LoadOptions
from kvledger.engine.sampling_params import SamplingParams
from kvledger.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from kvledger.engine import Engine, EngineStats
    from kvledger.engine.text_generation import Answer

# Of a prompt, in the line above its text.
LABEL_WIDTH = 70


def register(app: typer.Typer) -> None:
    """Adds the subcommand."""
    app.command(
        "generate",
        help="Let a model go on from your prompts, with every key and value in a block of the ledger.\n\n"
        "All options, and what --stats shows: docs/generate.md.",
    )(OptionsCommand("generate", GenerateOptions, run))


def run(options: GenerateOptions) -> None:
    """Answers the prompts. typer.Exit(1) when one of them ended with an error."""
    try:
        prompts = options.prompts()
        load_options, params = load_options_of(options), sampling_params_of(options)
        require_packages()
        answers, engine = generate(options, prompts, load_options, params)
    except ConfigError as error:
        raise typer.BadParameter(in_option_words(str(error))) from error
    if options.json:
        print_json(options, answers, engine)
    elif options.stats:
        from rich.console import Console

        Console(stderr=True, highlight=False).print(stats_table(engine.stats))
    failed = [answer for answer in answers if answer.finish_reason == "error"]
    for answer in failed:
        print(f"kvledger: {answer.error}", file=sys.stderr)
    if failed:
        raise typer.Exit(1)


def load_options_of(options: GenerateOptions) -> LoadOptions:
    return LoadOptions(
        options.model,
        num_blocks=options.num_blocks,
        block_size=options.block_size,
        max_model_len=options.max_model_len,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        gpu_memory_utilization=options.gpu_memory_utilization,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
        enable_prefix_caching=not options.no_prefix_caching,
        num_speculative_tokens=options.num_speculative_tokens if options.draft else 0,
        dtype=options.dtype,
        device=options.device,
    )


def sampling_params_of(options: GenerateOptions) -> SamplingParams:
    return SamplingParams(
        options.temperature,
        options.top_p,
        options.top_k,
        options.seed,
        max_tokens=options.max_tokens,
        ignore_eos=options.ignore_eos,
    )


def require_packages(names: Sequence[str] = ("torch", "transformers")) -> None:
    """One line with the cure for a machine without the extra, and the end."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        print(f"kvledger: generate needs {' and '.join(missing)}: pip install 'kvledger[demo]'", file=sys.stderr)
        raise typer.Exit(1)


def generate(
    options: GenerateOptions, prompts: list[str], load_options: LoadOptions, params: SamplingParams
) -> "tuple[list[Answer], Engine]":
    """Loads the model and answers all prompts together."""
    keep_quiet()
    from kvledger.engine.loading import load_engine
    from kvledger.engine.text_generation import TextGeneration

    engine, loaded = load_engine(load_options, lambda line: print(line, file=sys.stderr))
    generation = TextGeneration(engine, loaded.tokenizer, None if options.json else TextPrinter(prompts).hear)
    for prompt, own in zip(prompts, params_of_each(params, len(prompts)), strict=True):
        generation.add(prompt, own, chat=options.chat)
    return generation.run(), engine


def keep_quiet() -> None:
    """Warnings of transformers are for its programmers; progress bars are for a terminal."""
    if not sys.stderr.isatty():
        # Read when tqdm is imported, by what transformers uses.
        os.environ.setdefault("TQDM_DISABLE", "1")
    from transformers.utils import logging

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def params_of_each(params: SamplingParams, num_prompts: int) -> Sequence[SamplingParams]:
    """The same for each prompt, but for the seed: counted up, so that equal prompts get different texts."""
    if params.seed is None:
        return [params] * num_prompts
    return [replace(params, seed=params.seed + number) for number in range(num_prompts)]


class TextPrinter:
    """Writes texts that come all at once one after the other: the first one live, the next when it is done."""

    def __init__(self, prompts: list[str]) -> None:
        self._prompts = prompts
        self._held = [""] * len(prompts)
        self._done = [False] * len(prompts)
        self._current = 0
        self._start()

    def hear(self, number: int, piece: str) -> None:
        """The next piece of a prompt's text; "" when it is done."""
        self._held[number] += piece
        self._done[number] = self._done[number] or not piece
        while self._current < len(self._prompts):
            print(self._held[self._current], end="", flush=True)
            self._held[self._current] = ""
            if not self._done[self._current]:
                return
            print(flush=True)
            self._current += 1
            self._start()

    def _start(self) -> None:
        """The line above a text, where there are several."""
        if len(self._prompts) > 1 and self._current < len(self._prompts):
            print(f"[{self._current + 1}] {label(self._prompts[self._current])}", flush=True)


def label(prompt: str) -> str:
    """The end of a prompt, on one line: there it differs from others that begin the same."""
    line = " ".join(prompt.split())
    return line if len(line) <= LABEL_WIDTH else "..." + line[3 - LABEL_WIDTH :]


def print_json(options: GenerateOptions, answers: "list[Answer]", engine: "Engine") -> None:
    import msgspec

    result = {
        "model": options.model,
        "answers": [asdict(answer) for answer in answers],
        "stats": engine.stats.as_dict(),
    }
    print(msgspec.json.encode(result).decode())


def stats_table(stats: "EngineStats") -> "Table":
    from rich.table import Table

    table = Table(title="What the ledger did", title_justify="left", title_style="bold", box=None, show_header=False)
    rows = [
        ("prompt tokens", f"{stats.num_prompt_tokens:,}"),
        ("  from the prefix cache", f"{stats.num_hit_tokens:,} ({stats.hit_rate:.1%})"),
        ("  computed", f"{stats.num_prompt_tokens_computed:,}"),
        ("tokens generated", f"{stats.num_generated_tokens:,}"),
        ("steps", f"{stats.num_steps:,}"),
        ("requests in a step, at most", f"{stats.peak_running:,}"),
        ("blocks in use, at most", f"{stats.peak_blocks:,} of {stats.num_blocks:,} ({stats.peak_usage:.1%})"),
        ("preemptions", f"{stats.num_preemptions:,}"),
    ]
    if stats.num_preemptions:
        rows += [
            ("  took", f"{stats.num_lost_tokens:,} tokens"),
            ("  found again in the cache", f"{stats.num_resumed_hit_tokens:,} tokens"),
            ("  computed again", f"{stats.num_recomputed_tokens:,} tokens"),
        ]
    if stats.num_drafts:
        rows.append(
            ("drafts accepted", f"{stats.num_accepted_drafts:,} of {stats.num_drafts:,} ({stats.acceptance_rate:.1%})")
        )
    for name, value in rows:
        table.add_row(name, value)
    return table
