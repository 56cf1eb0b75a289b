"""What SGLang keeps for the life of a process and a model must not leave to the next. Imports SGLang: only the engine
process may import this."""

from __future__ import annotations

from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.model_executor import input_buffers
from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
from sglang.srt.model_executor.runner_utils.pool import set_global_graph_memory_pool


def forget() -> None:
    """A model has left, its graphs are gone.

    - The buffers that graphs read their inputs from are shared by name and size. The next model would warm up with the
      slots of the last one's requests in them, write there, and nothing may be mapped there any more.
    - The logits of all graphs are one buffer, in memory of the model (`graph_memory`).
    - Graphs' memory: a pool whose graphs are gone is returned to the device.
    - Tables of rotary embeddings, some megabytes for each shape that was ever here.
    """
    input_buffers._forward_input_buffer_pool.clear()
    GraphSharedOutput._process_shared = None
    set_global_graph_memory_pool(None)
    factory._ROPE_DICT.clear()
