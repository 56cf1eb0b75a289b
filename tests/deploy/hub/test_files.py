import pytest

from deploy.hub import files

WHOLE = ["config.json", "model.safetensors", "tokenizer.json"]


def test_files_of_a_model_are_its_weights_once_and_its_small_files():
    others = [
        "pytorch_model.bin",
        "original/consolidated.00.pth",
        "original/params.json",
        "onnx/model.onnx",
        "README.md",
    ]
    small = ["merges.txt", "chat_template.jinja", "tokenizer.model"]
    assert files.of_model([*WHOLE, *others, *small], ()) == [*WHOLE, *small]
    parts = ["config.json", "model.safetensors.index.json", "a.safetensors", "b.safetensors"]
    assert (
        files.of_model([*parts, "consolidated.safetensors", "model.gguf"], {"a.safetensors", "b.safetensors"}) == parts
    )


def test_configurations_of_modules_belong_to_a_model_of_sentence_transformers_only():
    pooling = "1_Pooling/config.json"
    assert files.of_model([*WHOLE, pooling], ()) == WHOLE
    assert files.of_model([*WHOLE, "modules.json", pooling], ()) == [*WHOLE, "modules.json", pooling]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["config.json", "pytorch_model.bin"], "pickled files only"),
        (["m-Q4.gguf", "README.md"], "GGUF"),
        (["config.json", "tf_model.h5"], "another framework"),
        (["adapter_config.json", "adapter_model.safetensors"], "adapter"),
        (["model_index.json", "unet/model.safetensors"], "diffusers"),
        (["params.json", "consolidated.safetensors"], "publisher's own format"),
        (["config.json", "params.json"], "no safetensors"),
        (["README.md"], "no config.json"),
    ],
)
def test_repository_without_a_model_is_refused_by_what_it_has(names, words):
    assert words in files.fault(names)
    assert files.fault(WHOLE) is None


def test_adapter_is_its_own_two_files_where_one_will_do():
    assert files.fault(["adapter_config.json", "adapter_model.bin"], adapters=True).startswith("it is an adapter")
    names = [*files.ADAPTER, "tokenizer.json", "config.json", "optimizer.safetensors"]
    assert files.fault(names, adapters=True) is None and files.of_model(names, ()) == list(files.ADAPTER)
    assert files.of_model([*WHOLE, *files.ADAPTER], ()) == [*WHOLE, files.ADAPTER[0]], "a whole model is one"
