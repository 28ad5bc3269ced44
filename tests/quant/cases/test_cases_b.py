"""Known faults of loading, section B of the list of cases: each by its number, with the right
behaviour, through the doors users come in by."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from front_door import changed_model, recipe_file, served_nll, set_config
from safetensors.torch import load_file, save_file
from said import Quantize
from torch import Tensor

from quant.artifact.artifact import open_artifact
from quant.artifact.durable import write_safetensors
from quant.artifact.errors import ArtifactError, IntegrityError
from quant.artifact.manifest import MANIFEST_NAME, FileRecord, TensorRecord
from quant.errors import QuantError
from runtime.api import LLM
from runtime.engine.load import ProbeError
from tests.quant.foreign_checkpoints import quantized_copy

Tiny = Callable[..., Path]
Make = Callable[..., Path]
INDEX = "model.safetensors.index.json"
IDS = tuple(range(5, 40))
SMALL = {"max_model_len": 64, "num_gpu_blocks_override": 16}


@pytest.fixture
def w4(tiny_model: Tiny, artifact: Make, tmp_path: Path) -> Path:
    """A 4-bit artifact of one's own."""
    made = artifact(tiny_model(), scheme="w4a16", group_size=32)
    return Path(shutil.copytree(made, tmp_path / "art"))


def start(artifact: Path) -> LLM:
    return LLM(artifact, **SMALL)


@pytest.mark.parametrize("where", ["both", "shard", "index"])
@pytest.mark.parametrize("leaf", ["weight_scale", "weight_packed"])
def test_b01_a_missing_tensor_stops_the_start_by_name(w4: Path, where: str, leaf: str) -> None:
    name = f"model.layers.1.mlp.down_proj.{leaf}"
    index = json.loads((w4 / INDEX).read_text())
    shard = w4 / index["weight_map"][name]
    if where != "shard":
        del index["weight_map"][name]
        (w4 / INDEX).write_text(json.dumps(index))
    if where != "index":
        save_file({k: v for k, v in load_file(shard).items() if k != name}, shard)
    began = time.process_time()
    with pytest.raises(ArtifactError) as refused:
        start(w4)
    assert time.process_time() - began < 10
    assert (
        shard.name in str(refused.value)
        or name in str(refused.value)
        or INDEX in str(refused.value)
    )
    with pytest.raises(ArtifactError, match=leaf):  # and the tensor, once the files are listed anew
        start(listed_anew(w4))


def listed_anew(artifact: Path) -> Path:
    """artifact.json brought in line with the files' sizes and hashes, as a careless tool would."""
    import hashlib

    path = artifact / MANIFEST_NAME
    data = json.loads(path.read_text())
    for name in data["files"]:
        raw = (artifact / name).read_bytes()
        data["files"][name] = {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    path.write_text(json.dumps(data))
    return artifact


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut by 1000": lambda raw: raw[:-1000],
    "cut to 4": lambda raw: raw[:4],
    "empty": lambda raw: b"",
    "100 more": lambda raw: raw + b"x" * 100,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_b03_a_damaged_shard_names_file_and_sizes(w4: Path, damage: str) -> None:
    shard = sorted(w4.glob("*.safetensors"))[1]
    raw = shard.read_bytes()
    shard.write_bytes(DAMAGE[damage](raw))
    expected, found = str(len(raw)), str(shard.stat().st_size)
    with pytest.raises(IntegrityError) as refused:
        start(w4)
    for part in (shard.name, expected, found):
        assert part in str(refused.value)
    with pytest.raises(ArtifactError, match=shard.name):  # found by the header alone, too
        start(listed_anew(w4))


def test_b03_a_shard_that_is_not_there(w4: Path) -> None:
    shard = sorted(w4.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(IntegrityError, match=rf"{shard.name}: the file is missing"):
        start(w4)


def test_b05_both_zero_point_conventions_by_their_label(
    quantize: Quantize, tiny_model: Tiny, tmp_path: Path
) -> None:
    """Both correct forms give equal logits; the other's label is refused, and so is none, but for
    version 1, which tools that leave it out write: there the zero points must bear it out."""
    logits = []
    for version, other in (("gptq", "gptq_v2"), ("gptq_v2", "gptq")):
        model, _ = quantized_copy(
            tiny_model(), tmp_path / version, method="gptq", version=version, sym=False
        )
        assert quantize("convert", model, "--out", f"art-{version}").code == 0
        logits.append(served_nll(tmp_path / f"art-{version}", IDS))
        section = json.loads((model / "config.json").read_text())["quantization_config"]
        set_config(model, quantization_config={**section, "checkpoint_format": other})
        said = quantize("convert", model, "--out", "swapped")
        assert said.code == 2
        assert "the file is of the other version" in said.error.replace("\n", " ")
        del section["checkpoint_format"]
        set_config(model, quantization_config=section)
        said = quantize("convert", model, "--out", "unlabelled")
        if version == "gptq":
            assert said.code == 0
            assert "checkpoint_format is not written down" in said.text
            logits.append(served_nll(tmp_path / "unlabelled", IDS))
            shutil.rmtree(tmp_path / "unlabelled")
        else:
            assert said.code == 2
            assert "checkpoint_format is not written down" in said.error
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(("swapped", "unlabelled"))]
    assert all(torch.equal(logits[0], found) for found in logits)


def foreign(artifact: Path, out: Path) -> Path:
    """The artifact as another tool would have written it: without anything of ours."""
    shutil.copytree(artifact, out)
    for name in (MANIFEST_NAME, "recipe.yaml", "report.json", "report.md", "README.md"):
        (out / name).unlink()
    return out


GROUP = ("config_groups", "group_00")
ACTIVATIONS = {"num_bits": 8, "type": "int", "strategy": "token"}


@pytest.mark.parametrize(
    ("path", "value", "part"),
    [
        ((*GROUP, "weights", "num_bits"), "eight", "config_groups.group_00.weights.num_bits"),
        ((*GROUP, "weights", "strategy"), None, "config_groups.group_00.weights.strategy"),
        ((*GROUP, "weights", "group_size"), -5, "group_size"),
        ((*GROUP, "weights", "num_bit"), 8, "config_groups.group_00.weights.num_bit"),
        ((*GROUP, "input_activations"), {"num_bits": "eight"}, "input_activations.num_bits"),
        (
            (*GROUP, "input_activations"),
            ACTIVATIONS | {"dynamic": "yes"},
            "input_activations.dynamic",
        ),
        ((*GROUP, "input_activation"), None, "config_groups.group_00.input_activation"),
        ((*GROUP, "targets"), None, "config_groups.group_00.targets"),
        ((*GROUP, "format"), "packed", "config_groups.group_00.format"),
        (("config_group",), {}, "config_group"),
        (("ignore",), "lm_head", "ignore"),
        (("kv_cache_scheme",), {"num_bits": 8, "type": "floaty"}, "kv_cache_scheme"),
        (("quant_method",), "compressed", "quant_method"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else None,
)
def test_b07_config_errors_name_the_field(
    quantize: Quantize, tiny_model: Tiny, artifact: Make, tmp_path: Path,
    path: tuple[str, ...], value: Any, part: str,
) -> None:  # fmt: skip
    made = artifact(tiny_model(), scheme="w4a16", group_size=32)
    model = foreign(made, tmp_path / "model")
    section = json.loads((model / "config.json").read_text())["quantization_config"]
    place = section
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    set_config(model, quantization_config=section)
    said = quantize("convert", model, "--out", "art")
    assert said.code == 2
    assert part in said.error
    assert not (tmp_path / "art").exists()


@pytest.mark.parametrize(
    ("method", "change", "part"),
    [
        ("gptq", {"bits": "eight"}, "bits"),
        ("gptq", {"bits": None, "bitz": 4}, "bits"),
        ("gptq", {"group_size": -5}, "group_size"),
        ("gptq", {"sym": "yes"}, "sym"),
        ("gptq", {"desc_act": "no"}, "desc_act"),
        ("gptq", {"new_layout": True}, "new_layout"),
        ("awq", {"bits": "four"}, "bits"),
        ("awq", {"zero_point": None}, "zero_point"),
        ("awq", {"group_size": "all"}, "group_size"),
        ("awq", {"new_layout": True}, "new_layout"),
    ],
    ids=str,
)
def test_b07_gptq_and_awq_settings(
    quantize: Quantize, tiny_model: Tiny, tmp_path: Path, method: str, change: dict[str, Any],
    part: str,
) -> None:  # fmt: skip
    """A wrong value is an error; a key nobody knows may change what bits mean, so it is told."""
    model, _ = quantized_copy(tiny_model(), tmp_path / "model", method=method, sym=method == "gptq")
    section = json.loads((model / "config.json").read_text())["quantization_config"]
    changed = {k: v for k, v in {**section, **change}.items() if v is not None}
    set_config(model, quantization_config=changed)
    said = quantize("convert", model, "--out", "art")
    if part == "new_layout":
        assert said.code == 0
        assert "keys that are not known here and were not used: new_layout" in said.text
        return
    assert said.code == 2
    assert part in said.error
    assert not (tmp_path / "art").exists()


def test_b09_overrides_of_another_naming(
    quantize: Quantize, tiny_model: Tiny, artifact: Make, tmp_path: Path
) -> None:
    """In a recipe, and in the config.json of a mixed model: names that match no module."""
    mixed = [{"match": "*.down_proj", "scheme": "w8a16"}]
    for prefix in ("", "language_model."):
        rule = {"match": f"{prefix}model.layers.*.mlp.down_proj", "scheme": "w8a16"}
        recipe = recipe_file(tmp_path, scheme="w4a16", method="rtn", overrides=[rule])
        said = quantize("plan", "--recipe", recipe, "--model", tiny_model())
        if prefix:
            assert said.code == 2
            assert f"'{rule['match']}' matches no module" in said.error
        else:
            assert said.code == 0
    one = artifact(tiny_model(), scheme="w4a16", group_size=32, skip=["lm_head", "*.1.*"])
    two = artifact(tiny_model(), scheme="w4a16", group_size=32, overrides=mixed)
    for made, key, part in ((two, "targets", "matches no module"), (one, "ignore", "lm_head")):
        model = foreign(made, tmp_path / key)
        section = json.loads((made / "config.json").read_text())["quantization_config"]
        for holder in [section] if key == "ignore" else section["config_groups"].values():
            holder[key] = [f"language_model.{name}" for name in holder[key]]
        set_config(model, quantization_config=section)
        said = quantize("convert", model, "--out", "art")
        assert said.code == 2, key
        assert part in said.error
        assert not (tmp_path / "art").exists()


def scripted(tiny_model: Tiny, out: Path, chain: list[int]) -> Path:
    """A model that continues each token of `chain` with the next one: nothing but embedding and
    head speak, and the head of the next token is the embedding of this one."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
        vocab, width = tensors["model.embed_tokens.weight"].shape
        tensors["model.norm.weight"].fill_(1)
        tensors["model.embed_tokens.weight"].copy_(torch.eye(vocab, width))
        head = torch.zeros(vocab, width)
        for here, there in zip(chain, chain[1:], strict=False):
            head[there, here] = 1.0
        tensors["lm_head.weight"].copy_(head)

    return changed_model(tiny_model(hidden_size=320, num_hidden_layers=1), out, change)


@pytest.mark.parametrize("places", ["config+generation", "tokenizer"])
def test_b11_every_end_of_text_id_stops(
    tiny_model: Tiny, artifact: Make, tmp_path: Path, places: str
) -> None:
    """config.json says a, generation_config.json [a, b]; or tokenizer_config.json alone says b."""
    a, b, chain = 40, 41, [50, 51, 41, 52, 40, 53, 54, 55]
    model = scripted(tiny_model, tmp_path / "model", chain)
    if places == "tokenizer":
        set_config(model, eos_token_id=None)
        (model / "generation_config.json").write_text("{}")
        table = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
        text = next(token for token, i in table.items() if i == b)
        path = model / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token": text}))
    else:
        set_config(model, eos_token_id=a)
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [a, b]}))
    made = artifact(model, method="none", scheme="dense", skip=[])
    llm = LLM(made, **SMALL)
    prompt = (chain[0],)
    settings = {"temperature": 0.0, "max_tokens": 7}
    assert "".join(llm.stream(prompt, **settings)) == llm.text.decode([51])
    whole = "".join(llm.stream(prompt, ignore_eos=True, **settings))
    assert whole == llm.text.decode(chain[1:])


def test_b11_an_end_of_text_id_that_is_none_is_an_error(
    tiny_model: Tiny, artifact: Make, tmp_path: Path
) -> None:
    model = changed_model(tiny_model(), tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ["two"]}))
    made = artifact(model, method="none", scheme="dense", skip=[])
    with pytest.raises(ArtifactError, match=r"generation_config\.json: eos_token_id is \['two'\]"):
        start(made)


@pytest.mark.parametrize(
    ("leaf", "value"),
    [
        ("model.norm.weight", float("nan")),
        ("model.layers.1.input_layernorm.weight", float("inf")),
        ("model.layers.0.mlp.up_proj.weight_scale", float("nan")),
        ("model.layers.0.mlp.up_proj.weight_scale", 0.0),
        ("lm_head.weight", float("nan")),
    ],
)
def test_b13_what_is_not_finite_stops_the_start(w4: Path, leaf: str, value: float) -> None:
    """Sealed anew with every hash in order, as a tool with that fault would: nothing is served."""
    opened = open_artifact(w4)
    record = opened.manifest.tensors[leaf]
    tensors = {
        n: opened.reader.tensor(n).clone()
        for n, r in opened.manifest.tensors.items()
        if r.file == record.file
    }
    opened.reader.close()
    tensors[leaf].view(-1)[3] = value
    (w4 / record.file).unlink()
    written = write_safetensors(w4 / record.file, tensors)
    manifest = opened.manifest
    sealed = manifest.model_copy(
        update={
            "tensors": {
                **manifest.tensors,
                **{
                    name: TensorRecord(dtype=dtype, shape=shape, file=record.file, sha256=sha)
                    for name, (dtype, shape, sha) in written.tensors.items()
                },
            },
            "files": {
                **manifest.files,
                record.file: FileRecord(size=written.size, sha256=written.sha256),
            },
        }
    )
    (w4 / MANIFEST_NAME).write_bytes(sealed.to_bytes())
    open_artifact(w4, verify="full").reader.close()
    with pytest.raises((ProbeError, ArtifactError, QuantError, RuntimeError)) as refused:
        start(w4)
    assert leaf in str(refused.value) or "probe" in str(refused.value).lower()


def test_b13_nothing_runs_before_the_weights_are_in(
    w4: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are no placeholders: modules are made of the tensors that were read. The first forward
    comes after the last of them, and is the probe, which has an answer to compare with."""
    import runtime.engine.load as load
    from runtime.model.decoder import Decoder

    happened: list[str] = []

    def spy(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            happened.append(name)
            return result

        monkeypatch.setattr(owner, name, watched)

    spy(load, "load_decoder")
    spy(load, "check_probe")
    spy(Decoder, "forward")
    start(w4)
    assert happened[:3] == ["load_decoder", "forward", "check_probe"]
