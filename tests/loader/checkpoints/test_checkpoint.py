"""Reading a folder: sizes, generations, and every kind of broken checkpoint with its reason."""

import errno
import json
import os
from pathlib import Path

import pytest

from loader.checkpoints.checkpoint import fingerprint, read
from loader.checkpoints.errors import BrokenCheckpoint, PassingFault
from testing import format_checkpoints
from tests.loader import checkpoint_files
from tests.loader.checkpoint_files import SINGLE, change_config, change_header

FLOAT32 = 4
MIXTURE = checkpoint_files.LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "head_dim": 8,
}


def size(elements):
    """Of one tensor in a weights range of float32."""
    return -(-elements * FLOAT32 // 256) * 256


def test_checkpoint_sizes_are_those_on_the_device_and_not_of_the_files(tmp_path):
    found = read(checkpoint_files.write(tmp_path), FLOAT32)
    # 2 x (keys and values) x layers x KV heads x head size x bytes of a float.
    assert found.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4
    layer = 2 * size(32) + 2 * size(32 * 32) + 2 * size(16 * 32) + 3 * size(48 * 32)
    # Engines pad 100 rows of vocabulary to 128.
    assert found.weights_bytes == 2 * layer + size(32) + 2 * size(128 * 32)
    assert (found.context_tokens, found.vocabulary, found.architecture) == (64, 100, "LlamaForCausalLM")
    assert read(tmp_path, 2).kv_bytes_per_token == found.kv_bytes_per_token // 2


def test_checkpoint_on_two_devices_has_half_of_its_matrices_and_all_norms_on_each(tmp_path):
    one, two = read(checkpoint_files.write(tmp_path), FLOAT32), read(tmp_path, FLOAT32, devices=2)
    assert two.kv_bytes_per_token == one.kv_bytes_per_token // 2
    layer = 2 * size(32) + 2 * size(16 * 32) + 2 * size(8 * 32) + 3 * size(24 * 32)
    assert two.weights_bytes == 2 * layer + size(32) + 2 * size(64 * 32)


def test_key_value_heads_fewer_than_devices_are_replicated(tmp_path):
    two, four = read(checkpoint_files.write(tmp_path), FLOAT32, devices=2), read(tmp_path, FLOAT32, devices=4)
    assert four.kv_bytes_per_token == two.kv_bytes_per_token


def test_heads_that_cannot_be_divided_are_refused(tmp_path):
    checkpoint_files.write(tmp_path)
    with pytest.raises(BrokenCheckpoint, match="heads do not divide among 3 devices"):
        read(tmp_path, FLOAT32, devices=3)


def test_tied_weights_are_counted_once_also_when_the_file_has_both(tmp_path):
    tied = read(checkpoint_files.write(tmp_path / "a", tie_word_embeddings=True), FLOAT32)
    untied = read(checkpoint_files.write(tmp_path / "b"), FLOAT32)
    assert untied.weights_bytes - tied.weights_bytes == size(128 * 32)
    checkpoint_files.write(tmp_path / "c")  # with lm_head.weight
    change_config(tmp_path / "c", tie_word_embeddings=True)
    assert read(tmp_path / "c", FLOAT32).weights_bytes == tied.weights_bytes


def test_a_sharded_checkpoint_is_as_large_as_one_of_a_single_file(tmp_path):
    sharded = read(checkpoint_files.write(tmp_path / "a", shards=4), FLOAT32)
    single = read(checkpoint_files.write(tmp_path / "b"), FLOAT32)
    assert sharded.weights_bytes == single.weights_bytes


def test_tensors_that_no_engine_loads_are_ignored(tmp_path):
    def add(header):
        end = max(one["data_offsets"][1] for one in header.values())
        extra = {"dtype": "F32", "shape": [4], "data_offsets": [end, end + 16]}
        header["model.layers.0.self_attn.rotary_emb.inv_freq"] = extra

    whole = read(checkpoint_files.write(tmp_path), FLOAT32)
    change_header(tmp_path, add)
    assert read(tmp_path, FLOAT32).weights_bytes == whole.weights_bytes


def without(name):
    """Leaves one tensor out; the others move together."""

    def change(header):
        del header[name]
        at = 0
        for one in header.values():
            begin, end = one["data_offsets"]
            one["data_offsets"] = [at, at + end - begin]
            at += end - begin

    return lambda folder: change_header(folder, change)


def retyped(name, dtype, shape):
    """Gives one tensor another type and shape; the others move."""

    def change(header):
        header[name] |= {"dtype": dtype, "shape": shape}
        at = 0
        for one in header.values():
            nbytes = checkpoint_files.BYTES[one["dtype"]]
            for length in one["shape"]:
                nbytes *= length
            one["data_offsets"] = [at, at + nbytes]
            at += nbytes

    return lambda folder: change_header(folder, change)


def removed(*names):
    return lambda folder: [os.unlink(folder / name) for name in names]


def replaced(name, text):
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        pytest.param(
            lambda folder: os.truncate(folder / SINGLE, os.path.getsize(folder / SINGLE) - 1000),
            f"{SINGLE} is truncated: its header describes",
            id="truncated safetensors",
        ),
        pytest.param(removed(SINGLE), f"no weights: neither {SINGLE} nor", id="no weights"),
        pytest.param(
            without("model.layers.1.mlp.up_proj.weight"),
            "the weights lack model.layers.1.mlp.up_proj.weight",
            id="missing layer tensor",
        ),
        pytest.param(
            without("model.embed_tokens.weight"), "the weights lack model.embed_tokens.weight", id="missing embedding"
        ),
        pytest.param(
            without("lm_head.weight"), "the weights lack lm_head.weight", id="missing untied output embedding"
        ),
        pytest.param(
            lambda folder: change_config(folder, num_hidden_layers=3),
            "the weights lack model.layers.2.self_attn.q_proj.weight and 8 other tensors",
            id="a layer less than the configuration says",
        ),
        pytest.param(
            retyped("model.norm.weight", "BF16", [31]),
            "model.norm.weight is [31] where config.json makes it [32]",
            id="a tensor of another shape",
        ),
        pytest.param(
            retyped("model.norm.weight", "I8", [32]),
            "model.norm.weight is I8: config.json does not say how the weights are quantised",
            id="a quantised tensor",
        ),
        pytest.param(removed("config.json"), "has no config.json", id="no configuration"),
        pytest.param(replaced("config.json", "{"), "config.json is not JSON", id="bad JSON in the configuration"),
        pytest.param(replaced("config.json", "[]"), "config.json is not a JSON object", id="configuration is a list"),
        pytest.param(removed("tokenizer.json"), "no tokenizer: neither tokenizer.json", id="no tokenizer"),
        pytest.param(replaced("tokenizer.json", ""), "tokenizer.json is empty", id="empty tokenizer"),
        pytest.param(replaced("tokenizer.json", "{,}"), "tokenizer.json is not JSON", id="bad JSON in the tokenizer"),
        pytest.param(
            lambda folder: change_config(folder, architectures=["BailingMoeV3ForCausalLM"], kv_lora_rank=8),
            "multi-head latent attention (MLA)",
            id="unsupported attention",
        ),
        pytest.param(
            lambda folder: change_config(folder, architectures=["GPT2LMHeadModel"]),
            "the architecture GPT2LMHeadModel is not supported",
            id="unsupported architecture",
        ),
    ],
)
def test_broken_checkpoint_is_refused_in_one_line_that_names_its_fault(tmp_path, break_it, reason):
    folder = checkpoint_files.write(tmp_path)
    break_it(folder)
    with pytest.raises(BrokenCheckpoint) as broken:
        read(folder, FLOAT32)
    assert reason in str(broken.value)
    assert "\n" not in str(broken.value)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 132\n"


def only(**files):
    """A folder of these and nothing else."""

    def make(folder):
        for name in os.listdir(folder):
            os.unlink(folder / name)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text)

    return make


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        pytest.param(replaced(SINGLE, POINTER), f"{SINGLE} is a Git LFS pointer", id="weights not fetched"),
        pytest.param(
            replaced("tokenizer.json", POINTER), "tokenizer.json is a Git LFS pointer", id="tokenizer not fetched"
        ),
        pytest.param(
            replaced("config.json", POINTER), "config.json is a Git LFS pointer", id="configuration not fetched"
        ),
        pytest.param(
            lambda folder: (removed("tokenizer.json")(folder), (folder / "tokenizer.model").write_text(POINTER)),
            "tokenizer.model is a Git LFS pointer: run git lfs pull",
            id="older tokenizer not fetched",
        ),
        pytest.param(
            only(model__gguf="GGUF", README__md=""), "has no config.json, and its weights are GGUF", id="GGUF folder"
        ),
        pytest.param(
            lambda folder: (removed(SINGLE)(folder), (folder / "m-q4.gguf").write_text("GGUF")),
            "its weights are GGUF, which is not supported",
            id="GGUF beside a configuration",
        ),
        pytest.param(
            only(adapter_config__json='{"base_model_name_or_path": "org/base"}', adapter_model__safetensors=""),
            "it is an adapter (LoRA) for org/base, not a whole model: list it with base",
            id="LoRA",
        ),
        pytest.param(
            only(adapter_config__json='{"base_model_name_or_path": "/home/me/base"}', config__json="{}"),
            "it is an adapter (LoRA), not a whole model",
            id="LoRA of a folder, with a configuration",
        ),
        pytest.param(only(model_index__json="{}"), "it is a pipeline of diffusers", id="diffusers"),
        pytest.param(only(params__json="{}"), "its publisher's own format (params.json)", id="consolidated"),
        pytest.param(
            lambda folder: (only()(folder), (folder / "snapshots").mkdir()),
            "give one of the folders in its snapshots",
            id="a repository of the cache",
        ),
        pytest.param(only(pytorch_model__bin="PK"), "its weights are pickled files only", id="pickled"),
        pytest.param(
            lambda folder: (removed(SINGLE)(folder), (folder / "tf_model.h5").write_text("")),
            "its weights are of another framework",
            id="another framework",
        ),
    ],
)
def test_folders_of_other_formats_are_refused_with_what_to_do(tmp_path, break_it, reason):
    folder = checkpoint_files.write(tmp_path)
    break_it(folder)
    with pytest.raises(BrokenCheckpoint) as broken:
        read(folder, FLOAT32)
    assert reason in str(broken.value)
    assert not broken.value.may_pass, "the same files will not do later either"


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        pytest.param(only(), "its folder is empty", id="nothing mounted"),
        pytest.param(removed("config.json"), "its folder has no config.json", id="no configuration yet"),
        pytest.param(replaced("config.json", ""), "config.json is empty", id="a configuration that is being written"),
        pytest.param(removed(SINGLE), "no weights: neither", id="no weights yet"),
        pytest.param(removed("tokenizer.json"), "no tokenizer", id="no tokenizer yet"),
        pytest.param(replaced("tokenizer.json", ""), "tokenizer.json is empty", id="a tokenizer that is being written"),
        pytest.param(
            lambda folder: os.truncate(folder / SINGLE, os.path.getsize(folder / SINGLE) - 1),
            "is truncated",
            id="weights that are being written",
        ),
        pytest.param(lambda folder: os.truncate(folder / SINGLE, 5), "is truncated", id="a header that is not there"),
        pytest.param(
            lambda folder: (folder / SINGLE).write_bytes(bytes(4096)), "it begins with zeros", id="room made ahead"
        ),
    ],
)
def test_missing_or_incomplete_files_are_a_passing_fault(tmp_path, break_it, reason):
    folder = checkpoint_files.write(tmp_path)
    break_it(folder)
    with pytest.raises(BrokenCheckpoint) as broken:
        read(folder, FLOAT32)
    assert reason in str(broken.value) and broken.value.may_pass


def test_missing_shard_is_a_passing_fault(tmp_path):
    folder = checkpoint_files.write(tmp_path, shards=2)
    os.unlink(folder / "model-00002-of-00002.safetensors")
    with pytest.raises(PassingFault, match="names model-00002-of-00002.safetensors, which does not exist"):
        read(folder, FLOAT32)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE, errno.ENOMEM, errno.ESTALE])
@pytest.mark.parametrize(
    ("call", "file"),
    [("builtins.open", SINGLE), ("pathlib.Path.read_bytes", "config.json"), ("pathlib.Path.stat", "m")],
)
def test_unreadable_file_is_a_passing_fault_that_is_named_without_its_folder(tmp_path, monkeypatch, number, call, file):
    folder = checkpoint_files.write(tmp_path / "m")

    def fails(path, *args, **keys):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(call, fails)
    with pytest.raises(PassingFault) as fault:
        read(folder, FLOAT32)
    monkeypatch.undo()
    where = "its folder" if file == "m" else file
    assert str(fault.value) == f"{where}: {os.strerror(number)}"


def test_short_host_memory_is_a_passing_fault(tmp_path, monkeypatch):
    def fails(path):
        raise MemoryError

    folder = checkpoint_files.write(tmp_path)
    monkeypatch.setattr("pathlib.Path.read_bytes", fails)
    with pytest.raises(PassingFault, match="host memory is short"):
        read(folder, FLOAT32)


def test_unreadable_sampling_defaults_are_a_passing_fault(tmp_path, monkeypatch):
    folder = checkpoint_files.write(tmp_path)
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    whole = Path.read_bytes

    def fails(path):
        if path.name == "generation_config.json":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return whole(path)

    monkeypatch.setattr(Path, "read_bytes", fails)
    with pytest.raises(PassingFault, match="generation_config.json: Input/output error"):
        read(folder, FLOAT32)


def test_missing_folder_is_a_passing_fault_and_a_file_in_its_place_a_lasting_one(tmp_path):
    with pytest.raises(PassingFault, match="^its folder does not exist$"):
        read(tmp_path / "gone", FLOAT32)
    for name, kind in (("file", "a file"), ("m.Q4.gguf", "a GGUF file, which is not supported")):
        (tmp_path / name).write_text("")
        with pytest.raises(BrokenCheckpoint) as broken:
            read(tmp_path / name, FLOAT32)
        assert str(broken.value).startswith(f"it is {kind}: give a") and not broken.value.may_pass


def test_repeated_key_of_config_json_has_its_last_value_as_in_transformers(tmp_path):
    folder = checkpoint_files.write(tmp_path)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text('{"max_position_embeddings": 7, "model_type": "x", ' + text[1:])
    assert read(folder, FLOAT32).context_tokens == 64
    (folder / "config.json").write_text(text[:-1] + ', "max_position_embeddings": 32}')
    assert read(folder, FLOAT32).context_tokens == 32


def test_config_json_with_a_byte_order_mark_is_refused_as_by_transformers(tmp_path):
    folder = checkpoint_files.write(tmp_path)
    (folder / "config.json").write_text((folder / "config.json").read_text(), encoding="utf-8-sig")
    with pytest.raises(BrokenCheckpoint, match="config.json is not JSON: .*BOM"):
        read(folder, FLOAT32)


@pytest.mark.parametrize("files", [("tokenizer.model",), ("vocab.json", "merges.txt")])
def test_older_kinds_of_tokenizer_files_are_accepted(tmp_path, files):
    checkpoint_files.write(tmp_path)
    os.unlink(tmp_path / "tokenizer.json")
    for file in files:
        (tmp_path / file).write_text("{}")
    assert read(tmp_path, FLOAT32).vocabulary == 100


def touched(path):
    """Another time of change, whatever the clock's grain."""
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


def replaced_by_a_copy(path):
    """The same bytes and times in another inode."""
    stat, content = path.stat(), path.read_bytes()
    other = path.with_suffix(".new")
    other.write_bytes(content)
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.replace(other, path)


@pytest.mark.parametrize("file", [SINGLE, "config.json", "tokenizer.json"])
@pytest.mark.parametrize("change", [touched, replaced_by_a_copy, lambda path: os.truncate(path, 5)])
def test_a_changed_file_makes_another_generation(tmp_path, file, change):
    checkpoint_files.write(tmp_path)
    before = fingerprint(tmp_path)
    assert before == fingerprint(tmp_path) > 0
    change(tmp_path / file)
    assert fingerprint(tmp_path) != before


def test_generation_differs_by_the_number_of_devices(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert len({fingerprint(tmp_path, devices) for devices in (1, 2, 4)}) == 3
    assert fingerprint(tmp_path) == fingerprint(tmp_path, 1)


def test_files_that_are_no_part_of_the_model_do_not_change_its_generation(tmp_path):
    checkpoint_files.write(tmp_path)
    before = fingerprint(tmp_path)
    (tmp_path / "README.md").write_text(json.dumps("hello"))
    assert fingerprint(tmp_path) == before


def test_class_that_is_not_in_the_table_is_served_if_the_catalogue_says_unverified(tmp_path):
    known = read(checkpoint_files.write(tmp_path / "known"), FLOAT32)
    folder = checkpoint_files.write(tmp_path / "new", architectures=["OlmoForCausalLM"])
    with pytest.raises(BrokenCheckpoint, match="OlmoForCausalLM is not supported"):
        read(folder, FLOAT32)
    new = read(folder, FLOAT32, unverified=True)
    assert (known.verified, new.verified) == (True, False)
    assert (new.weights_bytes, new.kv_bytes_per_token) == (known.weights_bytes, known.kv_bytes_per_token)
    change_config(folder, kv_lora_rank=16)
    with pytest.raises(BrokenCheckpoint, match="latent"):  # its KV would be counted wrongly
        read(folder, FLOAT32, unverified=True)


def test_kv_of_one_byte_takes_half_and_is_for_gpus(tmp_path):
    folder = checkpoint_files.write(tmp_path)
    assert 2 * read(folder, 2, kv_dtype="fp8").kv_bytes_per_token == read(folder, 2).kv_bytes_per_token
    with pytest.raises(BrokenCheckpoint, match="for GPUs"):
        read(folder, FLOAT32, kv_dtype="fp8")


def test_token_of_a_mixture_goes_through_the_experts_that_it_is_sent_to(tmp_path):
    dense = read(checkpoint_files.write(tmp_path / "dense"), 2)
    assert dense.active_bytes == dense.weights_bytes
    folder = format_checkpoints.write(tmp_path / "mixture", MIXTURE, "bf16")
    (folder / "tokenizer.json").write_text("{}")
    mixture = read(folder, 2)
    experts = 2 * 8 * 3 * 64 * 32 * 2  # layers, experts, matrices of each, bytes
    assert mixture.weights_bytes - mixture.active_bytes == experts * 6 // 8


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["NewForCausalLM"]}, "SGLang has no class NewForCausalLM"),
        ({"architectures": ["New\ud800"]}, "is not the name of an architecture"),
        ({"is_encoder_decoder": True}, "an encoder with a decoder"),
        ({"global_head_dim": 64}, "KV of another kind"),
        ({"swa_head_dim": 64}, "KV of another kind"),
        ({"compress_ratios": [4, 128]}, "KV of another kind"),
        ({"architectures": ["LlamaMLP"]}, "SGLang has no class LlamaMLP"),
        ({"v_head_dim": 16}, "keys and values of different sizes"),
        ({"text_config": 5}, "text_config is not an object"),
        ({"num_hidden_layers": 10**18}, "num_hidden_layers is larger than"),
    ],
)
def test_unverified_class_that_cannot_be_counted_is_refused_all_the_same(tmp_path, changes, reason):
    folder = checkpoint_files.write(tmp_path, architectures=["OlmoForCausalLM"])
    read(folder, FLOAT32, unverified=True)
    change_config(folder, **changes)
    with pytest.raises(BrokenCheckpoint, match=reason):
        read(folder, FLOAT32, unverified=True)


def test_mixture_whose_tokens_go_through_none_or_more_than_all_experts_is_refused(tmp_path):
    for used in (0, 9):
        folder = format_checkpoints.write(tmp_path / str(used), MIXTURE, "bf16")
        (folder / "tokenizer.json").write_text("{}")
        change_config(folder, num_experts_per_tok=used)
        with pytest.raises(BrokenCheckpoint, match=f"num_experts_per_tok is {used} of 8 experts"):
            read(folder, 2)


def test_mixture_of_fewer_experts_than_devices_is_refused(tmp_path):
    folder = format_checkpoints.write(tmp_path / "m", {**MIXTURE, "num_experts": 2, "num_experts_per_tok": 1}, "bf16")
    (folder / "tokenizer.json").write_text("{}")
    read(folder, 2, devices=2)
    with pytest.raises(BrokenCheckpoint, match="2 experts do not divide among 4 devices"):
        read(folder, 2, devices=4)


def test_whole_file_of_weights_beside_others_is_refused_unless_engines_know_the_others(tmp_path):
    folder = checkpoint_files.write(tmp_path)
    (folder / "consolidated.safetensors").write_bytes(b"")
    read(folder, FLOAT32)
    (folder / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(BrokenCheckpoint, match="beside adapter_model.safetensors"):
        read(folder, FLOAT32)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path, name):
    folder = checkpoint_files.write(tmp_path)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(BrokenCheckpoint, match=f"{name} is no file but a pipe"):
        read(folder, FLOAT32)
