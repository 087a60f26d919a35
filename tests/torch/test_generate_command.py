"""`kvledger generate` from outside: texts on stdout, the rest on stderr, errors in the words of the options."""

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvledger.cli import main

Run = Callable[..., tuple[int, str, str]]
GREETING, WORLD = "Hello world, ", "Hello world, hello moon"


@pytest.fixture
def run(tiny_directory: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Exit code, stdout and stderr of one command line."""

    def run_command(*arguments: str, model: str | None = None, num_blocks: int = 64) -> tuple[int, str, str]:
        fixed = ("--model", model or str(tiny_directory), "--num-blocks", str(num_blocks), "--block-size", "4")
        code = main(["generate", *fixed, *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run_command


def expected(directory: Path, prompt: str, num_tokens: int) -> str:
    """What transformers' own generate says."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    asked = torch.tensor([tokenizer(prompt).input_ids])
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    found = model.generate(asked, attention_mask=torch.ones_like(asked), max_new_tokens=num_tokens, do_sample=False)
    text: str = tokenizer.decode(found[0, asked.shape[1] :], skip_special_tokens=True)
    return text


def answers(out: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(out)["answers"]
    return found


def test_one_prompt_gives_its_text_and_nothing_else(run: Run, tiny_directory: Path) -> None:
    code, out, err = run("--prompt", GREETING, "--max-tokens", "12")
    assert (code, err) == (0, "")
    assert out == expected(tiny_directory, GREETING, 12) + "\n"


def test_several_prompts_come_one_after_the_other_under_their_names(run: Run, tiny_directory: Path) -> None:
    code, out, _ = run("--prompt", GREETING, "--prompt", "x" * 75, "--max-tokens", "6")
    texts = [expected(tiny_directory, prompt, 6) for prompt in (GREETING, "x" * 75)]
    assert code == 0
    assert out == f"[1] Hello world,\n{texts[0]}\n[2] ...{'x' * 67}\n{texts[1]}\n"


def test_prompts_come_from_a_file_or_standard_input(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = f"{GREETING}\n\n{WORLD}\n"
    (tmp_path / "prompts.txt").write_text(lines)
    _, from_file, _ = run("--prompts-file", str(tmp_path / "prompts.txt"), "--max-tokens", "3")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    _, from_stdin, _ = run("--prompts-file", "-", "--max-tokens", "3")
    _, from_options, _ = run("--prompt", GREETING, "--prompt", WORLD, "--max-tokens", "3")
    assert from_file == from_stdin == from_options


def test_json_is_one_object_with_answers_and_stats(run: Run, tiny_directory: Path) -> None:
    code, out, err = run("--prompt", WORLD, "--prompt", WORLD, "--max-tokens", "5", "--json")
    result = json.loads(out)
    first, second = result["answers"]
    assert (code, err) == (0, "")
    assert (first["prompt"], first["text"]) == (WORLD, expected(tiny_directory, WORLD, 5))
    assert (len(first["prompt_token_ids"]), len(first["token_ids"])) == (23, 5)
    assert (first["finish_reason"], first["error"]) == ("length", "")
    assert second["token_ids"] == first["token_ids"]
    # 23 tokens in blocks of 4: the second prompt finds five blocks of the first one's.
    stats = result["stats"]
    assert (stats["num_prompt_tokens"], stats["num_hit_tokens"], stats["num_prompt_tokens_computed"]) == (46, 20, 26)
    assert stats["hit_rate"] == 20 / 46
    assert stats["num_blocks"] == 63


def test_stats_are_for_the_reader_and_stay_off_stdout(run: Run) -> None:
    code, out, err = run("--prompt", WORLD, "--prompt", WORLD, "--max-tokens", "5", "--stats", "--draft", "ngram")
    assert code == 0
    assert "prefix cache" not in out
    rows = dict(re.findall(r"^ *(\S.*?)  +(\S.*?) *$", err, re.MULTILINE))
    assert rows["prompt tokens"] == "46"
    assert rows["from the prefix cache"] == "20 (43.5%)"
    assert rows["computed"] == "26"
    assert rows["tokens generated"] == "10"
    assert rows["preemptions"] == "0"
    assert re.fullmatch(r"\d+ of 63 \(\d+\.\d%\)", rows["blocks in use, at most"])


def test_a_small_pool_preempts_and_changes_no_text(run: Run) -> None:
    prompts = ("--prompt", "abcdefgh", "--prompt", "ijklmnop", "--prompt", "qrstuvwx", "--max-tokens", "20")
    _, plenty, _ = run(*prompts)
    code, scarce, err = run(*prompts, "--stats", num_blocks=12)
    assert (code, scarce) == (0, plenty)
    rows = dict(re.findall(r"^ *(\S.*?)  +(\S.*?) *$", err, re.MULTILINE))
    assert int(rows["preemptions"]) > 0
    assert rows["computed again"].endswith("tokens")


def test_chunks_drafts_and_a_missing_cache_change_no_text(run: Run) -> None:
    _, plain, _ = run("--prompt", "abcabcabcabc", "--max-tokens", "24")
    for options in (
        ("--max-num-batched-tokens", "5"),
        ("--draft", "ngram"),
        ("--draft", "ngram", "--num-speculative-tokens", "2"),
        ("--no-prefix-caching",),
        ("--max-num-seqs", "1"),
        ("--max-model-len", "40"),
    ):
        assert run("--prompt", "abcabcabcabc", "--max-tokens", "24", *options)[1] == plain, options


def test_other_types_run(run: Run) -> None:
    for dtype in ("bfloat16", "float16"):
        _, out, _ = run("--prompt", GREETING, "--max-tokens", "3", "--dtype", dtype, "--json")
        assert len(answers(out)[0]["token_ids"]) == 3  # type: ignore[arg-type]


def test_sampling_is_repeatable_and_equal_prompts_differ(run: Run) -> None:
    def sampled(*options: str) -> list[object]:
        _, out, _ = run("--prompt", GREETING, "--prompt", GREETING, "--temperature", "1.5", "--json", *options)
        return [answer["token_ids"] for answer in answers(out)]

    first, second = sampled("--seed", "3")
    assert first != second
    assert sampled("--seed", "3") == [first, second]
    # Each prompt has a seed of its own, one after the other.
    assert sampled("--seed", "4")[0] == second
    assert sampled("--seed", "3", "--top-k", "1") == sampled("--seed", "9", "--top-p", "0.000001")


def test_the_end_of_text_ends_a_text_unless_ignored(run: Run) -> None:
    def finish(*options: str) -> object:
        _, out, _ = run("--prompt", GREETING, "--temperature", "30", "--max-tokens", "110", "--json", *options)
        return answers(out)[0]["finish_reason"]

    seed = next(seed for seed in range(20) if finish("--seed", str(seed)) == "stop")
    assert finish("--seed", str(seed), "--ignore-eos") == "length"


def test_a_chat_prompt_goes_through_the_template(run: Run) -> None:
    _, chat, _ = run("--prompt", "Hi", "--chat", "--max-tokens", "4", "--json")
    _, plain, _ = run("--prompt", "<user>Hi<assistant>", "--max-tokens", "4", "--json")
    for key in ("prompt_token_ids", "token_ids"):
        assert answers(chat)[0][key] == answers(plain)[0][key]


def test_a_prompt_that_can_never_fit_fails_alone(run: Run) -> None:
    code, out, err = run("--prompt", "abcdefghijklmnop", "--prompt", "a", "--max-tokens", "2", "--json", num_blocks=4)
    refused, answered = answers(out)
    assert code == 1
    assert (refused["finish_reason"], answered["finish_reason"]) == ("error", "length")
    assert err == (
        "kvledger: request 'prompt 1': 16 tokens need 4 blocks, the pool has 3; shorten the request or give the pool "
        "more blocks\n"
    )


def test_a_text_that_outgrows_the_pool_is_kept_up_to_there(run: Run, tiny_directory: Path) -> None:
    code, out, err = run("--prompt", "abcdef", "--max-tokens", "20", num_blocks=4)
    assert code == 1
    assert out == expected(tiny_directory, "abcdef", 7) + "\n"
    assert err.startswith("kvledger: request 'prompt 1': 13 tokens need 4 blocks, the pool has 3;")


def test_without_num_blocks_the_memory_decides(tiny_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, said in (
        ((), "Available KV cache memory: 1.00 GiB on cpu"),
        (("--kv-cache-memory-bytes", "1MiB"), "Available KV cache memory: 0.00 GiB on cpu"),
        (("--gpu-memory-utilization", "0.05", "--max-num-batched-tokens", "64"), "of cpu"),
    ):
        code = main(["generate", "--model", str(tiny_directory), "--prompt", "a", "--max-tokens", "2", *options])
        err = capsys.readouterr().err
        assert code == 0
        assert said in err
        assert "GPU KV cache size: " in err
        assert "Maximum concurrency for 128 tokens per request: " in err


def test_a_memory_that_holds_no_request_says_what_would(
    tiny_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--prompt", "a", "--kv-cache-memory-bytes", "20KiB")
    code = main(["generate", "--model", str(tiny_directory), *arguments])
    # A block of 16 tokens: 2 layers x 2 heads x 8 values x 4 bytes, keys and values: 4 KiB. Four beside the null block.
    assert code == 2
    assert "The estimated maximum model length is 64." in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--prompt None: nothing to go on from; give --prompt TEXT or --prompts-file FILE"),
        (("--prompt", ""), "--prompt '': empty"),
        (("--prompts-file", "no-such-file"), "--prompts-file 'no-such-file': cannot be read"),
        (("--prompt", "a", "--temperature", "-1"), "--temperature -1.0: not a temperature"),
        (("--prompt", "a", "--top-p", "2"), "--top-p 2.0: not a share"),
        (("--prompt", "a", "--max-tokens", "0"), "--max-tokens 0: must be at least 1"),
        (("--prompt", "a", "--num-blocks", "1"), "--num-blocks 1: one is the null block"),
        (("--prompt", "a", "--block-size", "0"), "--block-size 0: must be at least 1"),
        (("--prompt", "a", "--max-num-seqs", "9", "--max-num-batched-tokens", "4"), "--max-num-batched-tokens 4: less"),
        (
            ("--prompt", "a", "--max-model-len", "200"),
            "--max-model-len 200: the model's max_position_embeddings is 128",
        ),
        (("--prompt", "a", "--draft", "model"), "'model' is not one of 'ngram'"),
        (("--prompt", "a", "--device", "cuda:99"), "--device 'cuda:99': "),
        (("--prompt", "a", "--device", "abacus"), "--device 'abacus': "),
    ],
)
def test_a_wrong_option_is_named_with_its_cure(run: Run, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())


def test_a_model_that_is_not_there_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    for model, message in (
        ("no-such-model", "--model 'no-such-model': no directory and no file; give a Hugging Face directory"),
        (str(tmp_path / "notes.txt"), "a file, and no GGUF"),
        (str(tmp_path), "a directory with no config.json and no .gguf file"),
    ):
        code, _, err = run("--prompt", "a", model=model)
        assert code == 2
        assert message in " ".join(err.split())


def test_files_that_transformers_cannot_read_are_named(run: Run, tiny_directory: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_directory, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"no weights")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "llama"}')
    for name in ("broken", "empty"):
        code, _, err = run("--prompt", "a", model=str(tmp_path / name))
        assert code == 1
        assert err.startswith(f"kvledger: {tmp_path / name}: transformers cannot load it: ")


def test_a_model_without_a_chat_template_says_so(run: Run, tiny_directory: Path, tmp_path: Path) -> None:
    plain = Path(shutil.copytree(tiny_directory, tmp_path / "plain"))
    (plain / "chat_template.jinja").unlink()
    code, _, err = run("--prompt", "a", "--chat", model=str(plain))
    assert code == 2
    assert "--chat True: the model has no chat template; leave it out" in " ".join(err.split())
