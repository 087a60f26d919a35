"""Where a config comes from: aliases of bundled models, and the hub where it answers."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvledger.errors import ConfigError
from kvledger.models.aliases import aliases, find_alias
from kvledger.models.facts import model_facts
from kvledger.models.sources import find_in_catalogue, hub_answers, load_config
from kvledger.models.weights import model_weights
from tests.unit.plan.planning import plan


def test_every_alias_has_a_bundled_model_and_is_planned() -> None:
    assert len(aliases()) >= 324
    for alias in aliases().values():
        assert find_in_catalogue(alias.name) is None, f"{alias.name} is bundled itself"
        assert find_in_catalogue(alias.base) is not None
        facts = model_facts(load_config(alias.name))
        assert facts.name == alias.name
        assert facts.layers == model_facts(load_config(alias.base)).layers


def test_llama_33_has_the_layers_of_llama_31() -> None:
    (note,) = load_config("meta-llama/Llama-3.3-70B-Instruct").notes
    assert note.endswith("is planned as the bundled meta-llama/Llama-3.1-70B-Instruct, whose layers it has")
    assert load_config("Llama-3.3-70B-Instruct").name == "meta-llama/Llama-3.3-70B-Instruct"
    assert find_alias("nobody/nothing") is None


def test_changes_of_an_alias_are_in_its_config() -> None:
    assert model_facts(load_config("Qwen/Qwen3-30B-A3B-Instruct-2507")).context.longest == 262_144
    assert model_facts(load_config("zai-org/GLM-4.6")).context.longest == 202_752
    distilled = load_config("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B")
    assert (distilled.flag("tie_word_embeddings"), distilled.number("max_position_embeddings")) == (False, 131_072)


@pytest.mark.parametrize(
    ("name", "gib"),
    # As logs of these models say: 18.14 GiB, and 28.51 of the FP8 copy.
    [("Qwen/Qwen2.5-32B-Instruct-AWQ", 18.14), ("Qwen/Qwen3.8-27B-FP8", 28.51)],
)
def test_quantized_copies_have_their_weights(name: str, gib: float) -> None:
    found = plan(model_facts(load_config(name)), max_model_len=4096)
    assert found.budgets[0].terms[0].bytes / 2**30 == pytest.approx(gib, rel=0.01)


class FakeHub(ModuleType):
    """A hub with the files of one repository, and its client, which has them in its cache without a network too."""

    def __init__(self, folder: Path) -> None:
        super().__init__("huggingface_hub")
        self.folder = folder
        self.has_network = True
        self.asked: list[str] = []
        self.constants = SimpleNamespace(HF_HUB_OFFLINE=False, ENDPOINT="https://huggingface.co")
        utils: Any = ModuleType("huggingface_hub.utils")
        utils.EntryNotFoundError = type("EntryNotFoundError", (OSError,), {})
        self.utils = utils

    def get_session(self) -> "FakeHub":
        return self

    def head(self, url: str, timeout: float) -> None:
        self.asked.append(url)
        if not self.has_network:
            raise ConnectionError("Name or service not known")

    def hf_hub_download(self, name: str, file: str, etag_timeout: float, local_files_only: bool) -> str:
        assert local_files_only is not self.has_network
        self.asked.append(f"{name}/{file}")
        if not (self.folder / "config.json").exists():
            raise ConnectionError("no such repository")
        if not (self.folder / file).exists():
            raise self.utils.EntryNotFoundError(file)
        return str(self.folder / file)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    fake = FakeHub(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils", fake.utils)
    hub_answers.cache_clear()
    yield fake
    hub_answers.cache_clear()


def test_the_hub_goes_before_the_bundle_and_says_what_differs(hub: FakeHub) -> None:
    row = find_in_catalogue("Qwen/Qwen3-8B")
    assert row is not None
    (hub.folder / "config.json").write_text(json.dumps({**row.config, "num_hidden_layers": 40, "_name_or_path": "x"}))
    config = load_config("Qwen/Qwen3-8B")
    assert config.number("num_hidden_layers") == 40
    assert config.notes == [
        "the hub's config of Qwen/Qwen3-8B is planned; the bundled one differs in num_hidden_layers"
    ]
    (hub.folder / "config.json").write_text(json.dumps(dict(row.config)))
    assert load_config("Qwen/Qwen3-8B").notes == []


def test_the_bundle_is_there_where_the_hub_has_not_that_model(hub: FakeHub) -> None:
    assert load_config("Qwen/Qwen3-8B").source.startswith("bundled catalogue")
    assert hub.asked == ["https://huggingface.co", "Qwen/Qwen3-8B/config.json"]
    with pytest.raises(ConfigError, match=r"the hub did not give its config \(no such repository\)"):
        load_config("nobody/Nothing-1B")


def test_without_a_network_the_hub_is_asked_once_in_one_try(hub: FakeHub) -> None:
    hub.has_network = False
    for _ in range(2):
        assert load_config("Qwen/Qwen3-8B").source.startswith("bundled catalogue")
    with pytest.raises(ConfigError, match="cannot be reached, and nothing of this id was downloaded before"):
        load_config("nobody/Nothing-1B")
    assert hub.asked == ["https://huggingface.co", "nobody/Nothing-1B/config.json"]
    row = find_in_catalogue("Qwen/Qwen3-8B")
    assert row is not None
    (hub.folder / "config.json").write_text(json.dumps(dict(row.config)))
    assert load_config("nobody/Nothing-1B").source == "hub: nobody/Nothing-1B"


def test_a_bundled_name_without_its_owner_asks_no_hub(hub: FakeHub) -> None:
    assert load_config("Qwen3-8B").name == "Qwen/Qwen3-8B"
    assert load_config("Qwen/Qwen3-8B", offline=True).name == "Qwen/Qwen3-8B"
    assert hub.asked == []


def test_a_model_that_decodes_with_fewer_layers_than_it_encodes_with() -> None:
    """Whisper turbo: 809 million parameters, 4 decoder layers behind 32 of the encoder."""
    facts = model_facts(load_config("openai/whisper-large-v3-turbo"))
    assert [layer.role for layer in facts.layers] == ["self_attn", "encoder_attn"] * 4
    found = plan(facts)
    assert found.budgets[0].terms[0].bytes == pytest.approx(809e6 * 2, rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions"),
    # As the models' cards say.
    [
        ("ByteDance-Seed/Seed-OSS-36B-Instruct", 36.2),
        ("bigcode/starcoder2-15b", 16.0),
        ("01-ai/Yi-1.5-34B-Chat", 34.4),
        ("CohereLabs/c4ai-command-r7b-12-2024", 8.03),
        ("CohereLabs/c4ai-command-a-03-2025", 111.0),
        ("microsoft/Phi-3-medium-128k-instruct", 14.0),
        ("zai-org/GLM-4-32B-0414", 32.6),
        ("mistralai/Codestral-22B-v0.1", 22.2),
        ("Qwen/Qwen2.5-VL-3B-Instruct", 3.75),
        ("Qwen/Qwen2.5-VL-32B-Instruct", 33.5),
        ("Qwen/Qwen2.5-VL-72B-Instruct", 73.4),
        ("BAAI/bge-m3", 0.568),
    ],
)
def test_derived_models_have_the_parameters_of_their_cards(name: str, billions: float) -> None:
    facts = model_facts(load_config(name))
    counted = sum(weight.params for weight in model_weights(facts.config, facts.layers))
    assert counted == pytest.approx(billions * 1e9, rel=0.01)
    assert any("not a copy of the model's own file" in note for note in facts.config.notes)


# Billions of parameters as they are published, written down like the configs: without their files or cards at hand.
PUBLISHED = {
    "allenai/OLMoE-1B-7B-0924-Instruct": 6.92, "allenai/Olmo-3-7B-Instruct": 7.30,
    "upstage/SOLAR-10.7B-Instruct-v1.0": 10.73, "internlm/internlm3-8b-instruct": 8.80, "arcee-ai/AFM-4.5B": 4.62,
    "EleutherAI/pythia-1.4b": 1.41, "EleutherAI/gpt-j-6b": 6.05, "bigscience/bloom-7b1": 7.07,
    "google/gemma-3-270m-it": 0.268, "CohereLabs/aya-expanse-8b": 8.03, "CohereLabs/c4ai-command-r-plus": 103.8,
    "ai21labs/AI21-Jamba-Mini-1.7": 51.6, "ai21labs/AI21-Jamba-Large-1.7": 398.6, "LiquidAI/LFM2-1.2B": 1.17,
    "baidu/ERNIE-4.5-0.3B-PT": 0.361, "baidu/ERNIE-4.5-21B-A3B-PT": 21.8, "baidu/ERNIE-4.5-300B-A47B-PT": 300,
    "inclusionAI/Ling-mini-2.0": 16.26, "inclusionAI/Ling-flash-2.0": 102.9, "inclusionAI/Ring-1T": 1000,
    "rednote-hilab/dots.llm1.inst": 142.8, "moonshotai/Kimi-Linear-48B-A3B-Instruct": 49.1,
    "state-spaces/mamba-2.8b-hf": 2.77, "tiiuae/falcon-mamba-7b-instruct": 7.27, "openbmb/MiniCPM4-8B": 8.19,
    "meituan-longcat/LongCat-Flash-Chat": 560,
}  # fmt: skip


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_configs_without_a_source_have_about_the_published_parameters(name: str, billions: float) -> None:
    facts = model_facts(load_config(name))
    assert "not a known family" not in " ".join(facts.config.notes)
    counted = sum(weight.params for weight in model_weights(facts.config, facts.layers)) / 1e9
    assert counted == pytest.approx(billions, rel=0.01)
