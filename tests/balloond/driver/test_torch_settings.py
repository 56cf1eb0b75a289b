import pytest

from balloond.driver.torch_settings import conflict


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("value", ["expandable_segments:True", "max_split_size_mb:64, expandable_segments:true"])
def test_expandable_segments_are_refused_with_the_variable_that_sets_them(name, value):
    assert conflict({name: value}).startswith(f"{name} sets expandable_segments")


@pytest.mark.parametrize(
    "value", ["", "expandable_segments:False", "max_split_size_mb:64,roundup_power2_divisions:[16:0,>:0]", "backend:x"]
)
def test_allocator_conflict_ignores_other_settings(value):
    assert conflict({"PYTORCH_CUDA_ALLOC_CONF": value}) == ""
    assert conflict({}) == ""
