"""Settings of placement that make no sense together are refused when they are read."""

import pytest
from pydantic import ValidationError

from placement.config import PlacementConfig


def config(**settings):
    return PlacementConfig(name="p", listen="unix:/p", groups=[], loaders=["unix:/l"], **settings)


def test_config_short_window_is_no_longer_than_the_long_one_and_at_least_a_second():
    assert config(window_s=20, short_window_s=20).window_s == 20
    with pytest.raises(ValidationError, match="window_s is 15, shorter than short_window_s, 20"):
        config(window_s=15)
    with pytest.raises(ValidationError, match="short_window_s"):
        config(short_window_s=0.4)


def test_config_with_fixed_places_requires_rebalance_to_be_off():
    with pytest.raises(ValidationError, match="rebalance has to be false"):
        config(places={"a": "cpu:0"})
    assert config(places={"a": "cpu:0"}, rebalance=False).places
