"""What a folder's generation_config.json says of how tokens are drawn."""

import json

import pytest
import structlog.testing

from loader.checkpoints.checkpoint import read
from loader.checkpoints.errors import BrokenCheckpoint, PassingFault
from loader.checkpoints.generation_defaults import FILE, SamplingDefaults
from tests.loader import checkpoint_files

FLOAT32 = 4


def said(folder, text):
    checkpoint_files.write(folder)
    (folder / FILE).write_text(text)
    with structlog.testing.capture_logs() as told:
        found = read(folder, FLOAT32).sampling
    return found, [each["why"] for each in told]


def test_generation_config_values_are_used_only_for_fields_of_requests(tmp_path):
    told = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "repetition_penalty": 1.05,
        "min_p": 0.1,
        "do_sample": False,
        "eos_token_id": [1, 2],
        "max_new_tokens": 9,
    }
    assert said(tmp_path, json.dumps(told)) == (SamplingDefaults(0.6, 0.9, 20, 1.05, 0.1), [])


def test_folder_without_generation_config_has_empty_sampling_defaults(tmp_path):
    assert read(checkpoint_files.write(tmp_path), FLOAT32).sampling == SamplingDefaults()


@pytest.mark.parametrize("no_limit", [0, -1, None])
def test_sampling_value_that_means_no_limit_is_left_out(tmp_path, no_limit):
    found, _ = said(tmp_path, json.dumps({"temperature": 0, "top_k": no_limit, "top_p": None}))
    assert found == SamplingDefaults(temperature=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.5),
        ("temperature", 2.5),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -5),
        ("top_k", 2.5),
        ("top_k", 1 << 31),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", float("nan")),
    ],
)
def test_sampling_default_that_no_request_may_have_is_named_and_not_used(tmp_path, name, value):
    found, why = said(tmp_path, json.dumps({"top_p": 0.5, "temperature": 0.7} | {name: value}))
    assert getattr(found, name) is None
    assert why == [f"{FILE}: {name} = {value!r}"]


def test_generation_config_that_is_no_object_is_a_broken_checkpoint(tmp_path):
    with pytest.raises(BrokenCheckpoint, match=f"{FILE} is not a JSON object"):
        said(tmp_path, "[0.6]")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"eos_token_id": [1,', f"{FILE} is not JSON: "),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", f"{FILE} is a Git LFS pointer"),
        ('{"eos_token_id": "</s>"}', f"{FILE}: eos_token_id = '</s>' is not the number of a token, or a list"),
        ('{"eos_token_id": [1, null]}', f"{FILE}: eos_token_id = \\[1, None\\] is not"),
    ],
)
def test_invalid_generation_config_is_a_lasting_fault(tmp_path, text, why):
    with pytest.raises(BrokenCheckpoint, match=why) as broken:
        said(tmp_path, text)
    assert not broken.value.may_pass


def test_empty_generation_config_is_a_passing_fault(tmp_path):
    with pytest.raises(PassingFault, match=f"{FILE} is empty"):
        said(tmp_path, "")
