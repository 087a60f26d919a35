"""Adds models to the bundled catalogue, or replaces them: compact facts of a config.json, one row a model.

    python scripts/add_to_catalogue.py ROWS.jsonl

Each line of ROWS is an object: name (the hub id), config (a config.json, or a path to one), hf_quant (the side file, or
a path, where there is one), grade (verbatim for a copy of the model's own file, else how it was come by) and source
(where it was read). Fields that no plan needs are left out; the rows are sorted and packed reproducibly.
"""

import gzip
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

CATALOGUE = Path(__file__).parents[1] / "src" / "kvledger" / "models" / "data" / "catalogue.tsv.gz"
# Parts of the names of fields about sampling, training, tokens and files.
NEEDLESS = re.compile(
    r".*(_token_id|_token_ids|_token_index|dropout|initializer|beam|penalty|_output|logits_process|_layernorm_type).*"
    r"|_name_or_path|prefix|suffix|do_sample|temperature|top_[kp]|typical_p|transformers_version|use_cache|max_length|"
    r"min_length|.*_eps|.*_epsilon|chunk_size_feed_forward|tokenizer_class|id2label|label2id|problem_type|auto_map|"
    r"torchscript|pruned_heads|no_repeat_ngram_size|encoder_no_repeat.*|return_dict.*|remove_invalid_values|"
    r"output_.*|use_bfloat16|tf_legacy_loss|.*suppress_tokens|bad_words_ids|task_specific_params|num_return_sequences|"
    r"early_stopping|cross_attention_hidden_size|add_cross_attention|finetuning_task|exponential_decay.*|"
    r"time_step_(min|max|floor|limit)|residual_in_fp32|image_grid_pinpoints|router_aux_loss_coef|pretraining_tp|"
    r"zp_dtype|actorder|block_structure_|global_compression_ratio|forced_.*|decoder_start.*|is_decoder|_commit_hash|"
    r"_attn_implementation.*|logits_to_keep|observer.*|unsloth.*|language_model_input.*|gradient_checkpointing"
)
# Of the quantization of activations a plan needs nothing.
ACTIVATIONS = ("input_activations", "output_activations")


def compact(value: object) -> object:
    """The value without empty and needless fields."""
    if isinstance(value, Mapping):
        kept = {name: compact(inner) for name, inner in value.items() if is_needed(str(name), inner)}
        return {name: kept[name] for name in sorted(kept)}
    return [compact(item) for item in value] if isinstance(value, list) else value


def is_needed(name: str, value: object) -> bool:
    if value is None or name in ACTIVATIONS:
        return False
    if name.startswith("quantization") or name in ("quantized_layers", "layers_block_type", "layer_types"):
        return True
    return NEEDLESS.fullmatch(name) is None


def side_file(quant: Mapping[str, object]) -> Mapping[str, object]:
    """A ModelOpt side file with one entry for all experts of a layer where they are alike."""
    inner = quant.get("quantization")
    listed = inner.get("quantized_layers") if isinstance(inner, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(listed, Mapping):
        return quant
    merged = {re.sub(r"experts\.\d+\.", "experts.*.", str(name)): entry for name, entry in listed.items()}
    return {**quant, "quantization": {**inner, "quantized_layers": merged}}


def loaded(given: object) -> Mapping[str, object]:
    found = json.loads(Path(given).read_text()) if isinstance(given, str) else given
    assert isinstance(found, Mapping), given
    return found


def row_of(entry: Mapping[str, object]) -> tuple[str, str]:
    row: dict[str, object] = {
        "config": compact(loaded(entry["config"])),
        "grade": entry["grade"],
        "source": entry["source"],
    }
    if entry.get("hf_quant"):
        row["hf_quant"] = compact(side_file(loaded(entry["hf_quant"])))
    return str(entry["name"]), json.dumps(row, separators=(",", ":"), sort_keys=True)


def main(path: str) -> None:
    lines = gzip.decompress(CATALOGUE.read_bytes()).decode().splitlines()
    rows = dict(line.split("\t", 1) for line in lines)
    before = len(rows)
    for line in Path(path).read_text().splitlines():
        name, row = row_of(json.loads(line))
        rows[name] = row
    text = "".join(f"{name}\t{rows[name]}\n" for name in sorted(rows, key=str.lower))
    CATALOGUE.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(f"{len(rows)} models, {len(rows) - before} new, {CATALOGUE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1])
