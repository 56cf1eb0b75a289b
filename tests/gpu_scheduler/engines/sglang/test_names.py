"""SGLang has every name that our code imports of it, also what only runs on a GPU."""

from __future__ import annotations

import pytest

from testing.engines.sglang_names import Name, names, ours
from tests.gpu_scheduler.engines.sglang.forks import Imported

pytestmark = pytest.mark.sglang

ALL = """
from testing.engines.sglang_names import all_ours, lacking
assert not (missing := lacking(all_ours())), ", ".join(map(str, missing))
"""
LOOKED_UP = """
import importlib, sys
from testing.engines import sglang_names
from testing.engines.sglang_names import Name, lacking

backend = "sglang.srt.layers.attention.flashattention_backend"
them = [
    Name("sglang.srt.managers.scheduler", "Scheduler", ""),
    Name("sglang.srt.managers.scheduler", "", ""),
    Name("sglang.srt.managers", "scheduler", ""),
    Name(backend, "FlashAttentionBackend", ""),
]
gone = [
    Name("sglang.srt.managers.scheduler", "Gone", ""),
    Name("sglang.srt.managers.gone", "", ""),
    Name("sglang.srt.managers.gone", "Scheduler", ""),
    Name(backend, "Gone", ""),
]
assert lacking(them + gone) == sorted(gone)

def no_gpu(name): raise RuntimeError("no GPU")
importlib.import_module = no_gpu  # as that of a module that needs one
assert lacking(them + gone) == sorted(gone)
"""


def test_sglang_has_every_name_that_we_import(imported: Imported) -> None:
    imported.run(ALL)


EMBED = """
import inspect

from loader.checkpoints.architectures.classes import CLASSES
from sglang.srt.models.registry import ModelRegistry

for name in [name for name, known in CLASSES.items() if known.embeds]:
    known, _ = ModelRegistry.resolve_model_cls([name])
    assert "get_embedding" in inspect.signature(known.forward).parameters, name
"""


def test_sglang_makes_embeddings_with_every_class_that_is_said_to_make_some(imported: Imported) -> None:
    imported.run(EMBED)


def test_what_is_gone_is_found_also_where_a_module_cannot_be_imported(imported: Imported) -> None:
    imported.run(LOOKED_UP)


def test_names_are_those_of_imports_and_attributes_of_modules() -> None:
    text = """
import os, sglang.version
from sglang.srt import environ as kept, runtime_context
from sglang.srt.sampling.sampling_params import SamplingParams

def inside():
    from sglang.srt.managers import scheduler
    return scheduler.Scheduler, kept.envs.SOME, SamplingParams.verify, os.path, sglang.version.__version__
"""
    assert sorted(set(names(text))) == [
        ("sglang.srt", "environ"),
        ("sglang.srt", "runtime_context"),
        ("sglang.srt.environ", "envs"),
        ("sglang.srt.managers", "scheduler"),
        ("sglang.srt.managers.scheduler", "Scheduler"),
        ("sglang.srt.sampling.sampling_params", "SamplingParams"),
        ("sglang.version", ""),
        ("sglang.version", "__version__"),
    ]


def test_names_of_gpus_are_among_ours() -> None:
    found = {(each.module, each.name) for each in ours(["gpu_scheduler"])}
    assert ("sglang.kernels.jit.utils", "get_jit_cuda_arch") in found
    assert all(isinstance(each, Name) and each.where.endswith(".py") for each in ours(["gpu_scheduler"]))
