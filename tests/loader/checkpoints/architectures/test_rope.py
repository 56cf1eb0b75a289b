"""For how many positions a rotary embedding is made, in every way that published models write it down."""

import pytest

from loader.checkpoints.architectures import rope
from loader.checkpoints.errors import BrokenCheckpoint

POSITIONS = 512
HEAD_DIM = 4
LISTS = {"short_factor": [1.0, 1.0], "long_factor": [2, 4.5]}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def context(**config):
    rope.check_factors(config, HEAD_DIM)
    return rope.context_tokens(config, config.get("max_position_embeddings", POSITIONS))


@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["type", "rope_type"])
@pytest.mark.parametrize(
    ("told", "expected"),
    [
        pytest.param(("default", {}), 512, id="default"),
        pytest.param(("default", {"factor": 4.0}), 512, id="default, whose factor means nothing"),
        pytest.param(("linear", {"factor": 4.0}), 2048, id="linear"),
        pytest.param(("linear", {"factor": 4}), 2048, id="linear by a whole number"),
        pytest.param(("linear", {"factor": 2.5, "original_max_position_embeddings": 100}), 1280, id="linear, original"),
        pytest.param(("dynamic", {"factor": 4.0}), 2048, id="dynamic"),
        pytest.param(("yarn", {"factor": 4.0}), 2048, id="yarn"),
        pytest.param(("yarn", {"factor": 4.0, "original_max_position_embeddings": 512}), 2048, id="yarn as on a card"),
        pytest.param(("yarn", {"factor": 4.0, "original_max_position_embeddings": 128}), 512, id="yarn, stretched"),
        pytest.param(("yarn", {"factor": 4.0, "original_max_position_embeddings": 400}), 1600, id="yarn, rounded up"),
        pytest.param(("yarn", {"factor": None, "original_max_position_embeddings": 128}), 512, id="yarn, no factor"),
        pytest.param(("llama3", LLAMA3), 512, id="llama3"),
        pytest.param(("longrope", {**LISTS, "original_max_position_embeddings": 128}), 512, id="longrope"),
        pytest.param(("su", LISTS), 512, id="su"),
    ],
)
def test_rope_scaling_of_every_kind_is_read_from_every_key(where, kind, told, expected):
    name, numbers = told
    assert context(**{where: {kind: name, **numbers}}) == expected


@pytest.mark.parametrize("nothing", [{}, {"rope_scaling": None}, {"rope_scaling": {}}, {"rope_parameters": {}}])
def test_context_without_rope_scaling_is_max_position_embeddings(nothing):
    assert context(**nothing) == POSITIONS


def test_original_positions_of_a_model_card_count_before_slightly_more_positions():
    card = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert context(max_position_embeddings=40960, rope_scaling=card) == 131072


def test_original_positions_may_be_beside_rope_scaling():
    assert context(original_max_position_embeddings=128, rope_scaling={"type": "yarn", "factor": 2.0}) == 256


def test_rope_scaling_counts_before_rope_parameters():
    linear = {"rope_type": "linear", "factor": 2.0}
    assert context(rope_scaling=linear, rope_parameters={"rope_type": "default"}) == 1024
    assert context(rope_scaling=None, rope_parameters=linear) == 1024


def test_rope_scaling_without_a_type_is_the_default_whatever_its_factor():
    assert context(rope_scaling={"factor": 2.0}) == POSITIONS


def test_rope_type_counts_before_type():
    assert context(rope_scaling={"rope_type": "default", "type": "linear", "factor": 2.0}) == POSITIONS


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        pytest.param([1], "rope_scaling = [1] is not an object", id="a list"),
        pytest.param({"type": "xpos"}, "of type 'xpos', which is not supported; these are: default, linear", id="kind"),
        pytest.param({"rope_type": None}, "of type None", id="no kind"),
        pytest.param({"rope_type": ["yarn"]}, "of type ['yarn']", id="a kind that is none"),
        pytest.param({"type": "linear"}, "rope_scaling.factor = None is not a number of 1 or more", id="no factor"),
        pytest.param({"type": "yarn", "factor": "4"}, "factor = '4'", id="a factor in quotes"),
        pytest.param({"type": "dynamic", "factor": 0.5}, "factor = 0.5", id="a factor below 1"),
        pytest.param({"type": "linear", "factor": float("inf")}, "factor = inf", id="an endless factor"),
        pytest.param({"type": "linear", "factor": True}, "factor = True", id="a truth value"),
        pytest.param({"type": "llama3", "factor": 8.0}, "low_freq_factor = None is not a number", id="llama3"),
        pytest.param(
            {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64.0},
            "original_max_position_embeddings = 64.0 is not a positive whole number",
            id="a broken length",
        ),
        pytest.param({"type": "longrope", **LISTS, "long_factor": [1.0]}, "long_factor is not a list of 2", id="list"),
        pytest.param({"type": "su", "long_factor": [1, 1]}, "short_factor is not a list of 2 numbers", id="no list"),
        pytest.param({"rope_theta": "x"}, "rope_scaling.rope_theta = 'x' is not a number above 0", id="theta"),
        pytest.param({"type": "yarn", "factor": 2.0, "beta_fast": "32"}, "beta_fast = '32' is not a number", id="beta"),
        pytest.param({"type": "yarn", "factor": 2.0, "truncate": "no"}, "truncate = 'no' is not true", id="truncate"),
        pytest.param(
            {"type": "su", **LISTS, "factor": "2"}, "rope_scaling.factor = '2' is not", id="factor of longrope"
        ),
        pytest.param(
            {**LLAMA3, "type": "llama3", "low_freq_factor": 0}, "low_freq_factor = 0 is not", id="endless wave"
        ),
        pytest.param({"full_attention": {"rope_type": "default"}}, "differs by kind of layer", id="by layer"),
    ],
)
def test_impossible_rope_scaling_is_refused_with_its_key(told, reason):
    with pytest.raises(BrokenCheckpoint) as broken:
        context(rope_scaling=told)
    assert reason in str(broken.value)
