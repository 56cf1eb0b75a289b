import re

import pytest

from gpu_scheduler.config import Arbitration, Engines, GpuSchedulerConfig
from gpu_scheduler.policy.group_facts import GroupRules
from gpu_scheduler.policy.memory.forecast import ForecastRules
from gpu_scheduler.policy.queue.admission import PrefillLimits
from gpu_scheduler.policy.queue.backlog import BacklogRules

MIB = 1 << 20


def configured(device, **engines):
    return GpuSchedulerConfig(
        name="g", listen="unix:g", group="g", devices=[device], balloond="", engines=Engines(**engines)
    )


@pytest.mark.parametrize(
    ("device", "sizes"),
    [("cpu:0", (256 << 10, 512 << 10)), ("cuda:1", (8 * MIB, 32 * MIB))],
)
def test_extent_sizes_have_defaults_by_kind_of_device(device, sizes):
    config = configured(device)
    assert (config.kv_extent_bytes, config.weights_extent_bytes) == sizes


def test_extent_sizes_that_are_configured_override_the_defaults():
    config = configured("cuda:0", kv_extent_bytes=2 * MIB, weights_extent_bytes=4 * MIB)
    assert (config.kv_extent_bytes, config.weights_extent_bytes) == (2 * MIB, 4 * MIB)


@pytest.mark.parametrize(
    ("devices", "why"),
    [
        ([], "1, 2 or 4 devices, not 0"),
        (["cpu:0", "cpu:1", "cpu:2"], "1, 2 or 4 devices, not 3"),
        (["cpu:0", "cpu:0"], "named twice"),
        (["cpu:0", "cuda:0"], "not of one kind"),
        (["gpu:0"], 'device \'gpu:0\' is neither "cpu:N" nor "cuda:N"'),
    ],
)
def test_devices_that_cannot_share_a_model_are_no_group(devices, why):
    with pytest.raises(ValueError, match=why):
        GpuSchedulerConfig(name="g", listen="unix:g", group="g", devices=devices, balloond="")


def test_options_of_either_kind_of_engine_are_numbers_or_their_text():
    options = configured(
        "cpu:0", options={"max_running_requests": 64, "page_size": "4", "step_ms": "0.5"}
    ).engines.options
    assert options == {"max_running_requests": "64", "page_size": "4", "step_ms": "0.5"}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"chunked_prefil_size": "99"}, "did you mean chunked_prefill_size?"),
        ({"zzz": "1"}, "unknown engine option 'zzz'; known are "),
        ({"max_running_requests": "sixty"}, "max_running_requests is a whole number, not 'sixty'"),
    ],
)
def test_an_option_that_no_engine_has_is_refused_before_one_is_started(options, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        configured("cpu:0", options=options)


def test_the_share_of_late_requests_is_a_setting_with_the_policy_s_default():
    assert Arbitration().backlog == BacklogRules()
    assert Arbitration(late_share=0.2, order="arrival").backlog == BacklogRules(order="arrival", late_share=0.2)
    with pytest.raises(ValueError, match="late_share"):
        Arbitration(late_share=1.5)


def test_switches_that_disable_a_rule_are_experiments_and_work_at_their_former_place():
    switches = {"order": "arrival", "prefill_turn": False, "protect_decodes": False}
    assert Arbitration(**switches) == Arbitration(experiments=switches)
    assert Arbitration(**switches).experiments.model_dump() == switches
    with pytest.raises(ValueError, match="order"):
        Arbitration(order="random")


def test_settings_work_under_their_former_names():
    assert Arbitration(**{"precedence_ms": 1, "precedence_batch": 2, "decode_turn_ms": 3}) == Arbitration(
        prefill_priority_ms=1, prefill_priority_batch=2, decode_arbitration_ms=3
    )
    with pytest.raises(ValueError, match="precedence_ms is prefill_priority_ms now"):
        Arbitration(**{"precedence_ms": 1, "prefill_priority_ms": 2})
    with pytest.raises(ValueError, match="experiments"):
        Arbitration(experiments="none", order="arrival")


def test_the_forecast_of_output_lengths_is_a_setting_with_the_policy_s_defaults():
    assert Arbitration().forecast == ForecastRules()
    assert Arbitration(forecast_tokens=512, forecast_weight=0.5).forecast == ForecastRules(first=512, weight=0.5)
    for name, value in {"forecast_tokens": -1, "forecast_weight": 1.5}.items():
        with pytest.raises(ValueError, match=name):
            Arbitration(**{name: value})


def test_the_core_of_a_group_gets_the_settings_of_arbitration():
    assert Arbitration().group == GroupRules(PrefillLimits(chunk_tokens=2048, joint_s=0.1))
    given = Arbitration(default_tpot_ms=50, protect_decodes=False)
    assert given.group == GroupRules(
        given.prefill_limits,
        tpot_s=0.05,
        throttles=False,
    )
