from __future__ import annotations

from pathlib import Path

import pytest

from gpu_scheduler.engines.sglang.base.errors import CommandError
from gpu_scheduler.engines.sglang.base.options import (
    Options,
    arguments,
    graph_sizes,
    has_states,
    has_window_pool,
    kernels_with_states,
    one_line,
    prefill_graph_tokens,
    prefill_graphs,
    prompts_with_states,
    prompts_with_tables,
)
from loader.checkpoints.architectures.classes import CLASSES
from protos import common_pb2
from testing import small_checkpoints


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        ({"model_type": "qwen3_next", "linear_num_key_heads": 16}, {}),
        ({"model_type": "nemotron_h", "mamba_num_heads": 64}, {"moe_runner_backend": "triton"}),
        ({"model_type": "nemotron_h", "mamba_num_heads": 64, "quantization_config": {"quant_method": "fp8"}}, {}),
    ],
)
def test_models_with_states_get_kernels_that_are_compiled_once_for_a_host(
    config: dict[str, object], experts: dict[str, str]
) -> None:
    assert kernels_with_states(config) == {"linear_attn_prefill_backend": "triton", **experts}


def test_no_more_prompts_with_states_begin_in_a_step_than_have_a_block_of_it_each() -> None:
    assert prompts_with_states(2048) == {"prefill_max_requests": 32}
    assert prompts_with_states(40) == {"prefill_max_requests": 1} and prompts_with_states(0) == {}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"text_config": null}', '{"text_config": []}'])
def test_a_folder_whose_configuration_says_nothing_is_left_to_sglang(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert not has_states(tmp_path) and not has_window_pool(tmp_path)
    assert prefill_graph_tokens(str(tmp_path), Options.parse({}, "cuda:0"), 1) > 0


def test_engines_have_a_pool_for_windows_for_the_classes_of_which_the_loader_says_so(tmp_path: Path) -> None:
    assert all(known.windows for known in CLASSES.values() if known.window_pool)
    assert all(known.window_pool for known in CLASSES.values() if known.two_shapes)
    for name in {**small_checkpoints.CLASSES, **small_checkpoints.NOT_SERVED}:
        folder = small_checkpoints.write(name, tmp_path / name)
        assert has_window_pool(folder) == CLASSES[name].window_pool, name


def test_engine_options_are_parsed_as_whole_numbers_by_name() -> None:
    options = Options.parse({"chunked_prefill_size": "64", "max_running_requests": "4"}, "cpu:0")
    assert (options.chunked_prefill_size, options.max_running_requests) == (64, 4)


@pytest.mark.parametrize(("requests", "tokens"), [(4, 32), (100, 100), (256, 256), (1000, 256)])
def test_a_prompts_log_probabilities_are_computed_for_as_many_tokens_as_the_quota_has_room_for(
    requests: int, tokens: int
) -> None:
    assert Options(max_running_requests=requests).scored_together == tokens


def test_prompts_of_a_step_are_bounded_where_flash_attention_makes_tables_for_a_window_pool(tmp_path: Path) -> None:
    everywhere = {**small_checkpoints.CLASSES, **small_checkpoints.NOT_SERVED}
    bounded = {name for name in everywhere if prompts_with_tables(small_checkpoints.write(name, tmp_path / name))}
    assert bounded == {"GptOssForCausalLM"}


def test_an_option_that_an_older_group_still_passes_on_has_no_effect() -> None:
    assert Options.parse({"window_pool": "1"}, "cpu:0") == Options.parse({}, "cpu:0")


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(CommandError, match="unknown engine option 'chunk'"):
        Options.parse({"chunk": "64"}, "cpu:0")


def test_a_value_that_is_no_number_is_refused_with_its_name() -> None:
    with pytest.raises(CommandError, match="reserve_low is a whole number, not 'two'"):
        Options.parse({"reserve_low": "two"}, "cpu:0")


def test_error_text_of_several_lines_becomes_one_line() -> None:
    assert one_line(ValueError("a\n  b\n")) == "ValueError: a b"
    assert one_line(KeyError()) == "KeyError"


def test_batch_sizes_with_graphs_are_a_quarter_apart_at_most() -> None:
    sizes = graph_sizes(256)
    assert sizes[:8] == [1, 2, 4, 8, 10, 12, 14, 16] and sizes[-3:] == [192, 224, 256] and len(sizes) == 24
    assert all(after <= 1.25 * before for before, after in zip(sizes[3:], sizes[4:], strict=False))
    assert graph_sizes(5) == [1, 2, 4, 5] and graph_sizes(1) == [1]


def test_prefill_has_graphs_up_to_the_size_that_is_asked_for() -> None:
    assert prefill_graphs(0) == {"disable_prefill_cuda_graph": True}
    sizes = prefill_graphs(512)["cuda_graph_bs_prefill"]
    assert sizes == [16, 32, 64, 128, 192, 256, 384, 512]
    assert prefill_graphs(5)["cuda_graph_bs_prefill"] == [5]


def test_prefill_has_no_graphs_where_sglang_would_have_none_by_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    options = Options.parse({}, "cuda:0")
    assert prefill_graph_tokens(str(tmp_path), options, 1) == 512
    assert prefill_graph_tokens(str(tmp_path), options, 2) == 0
    assert prefill_graph_tokens(str(tmp_path), Options.parse({"cuda_graphs": "0"}, "cuda:0"), 1) == 0
    (tmp_path / "config.json").write_text('{"hidden_size": 8, "vision_config": {}}')
    assert prefill_graph_tokens(str(tmp_path), options, 1) == 0
    (tmp_path / "config.json").write_text("no JSON")
    assert prefill_graph_tokens(str(tmp_path), options, 1) == 512


def test_a_gpu_has_defaults_of_its_own_and_other_devices_are_refused() -> None:
    assert Options.parse({}, "cuda:1").page_size == 16 and Options.parse({}, "cpu:0").page_size == 1
    assert Options.parse({"page_size": "32"}, "cuda:0").page_size == 32
    with pytest.raises(CommandError, match="serves cpu and cuda devices; it was given 'tpu:0'"):
        Options.parse({}, "tpu:0")


def test_prefill_graphs_of_small_models_on_a_gpu_are_larger_unless_an_option_says_otherwise() -> None:
    small = common_pb2.ModelSpec(weights_bytes=5 * 10**9, devices=2)
    assert Options.parse({}, "cuda:0", small).prefill_graph_tokens == 2048
    assert Options.parse({}, "cuda:0").prefill_graph_tokens == 512
    assert Options.parse({"prefill_graph_tokens": "0"}, "cuda:0", small).prefill_graph_tokens == 0
    assert Options.parse({}, "cpu:0", small).prefill_graph_tokens == 0


def test_prefill_graph_is_never_larger_than_a_prefill_step(tmp_path: Path) -> None:
    for given, graphs in (({}, 512), ({"chunked_prefill_size": "200"}, 200), ({"chunked_prefill_size": "-1"}, 512)):
        assert prefill_graph_tokens(str(tmp_path), Options.parse(given, "cuda:0"), 1) == graphs


def test_model_with_embedding_dimensions_is_started_as_an_embedding_model() -> None:
    options, model = Options.parse({}, "cpu:0"), common_pb2.ModelSpec(name="m", path="/m")
    assert arguments(model, "cpu:0", options, object)["is_embedding"] is False
    model.embedding.dimensions = 8
    assert arguments(model, "cpu:0", options, object)["is_embedding"] is True
