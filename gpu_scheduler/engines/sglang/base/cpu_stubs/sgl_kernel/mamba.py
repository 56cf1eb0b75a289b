"""The names that SGLang imports from `sgl_kernel.mamba`."""

from sgl_kernel.linear_attention import (
    causal_conv1d_fn_cpu as causal_conv1d_fn_cpu,
)
from sgl_kernel.linear_attention import (
    causal_conv1d_update_cpu as causal_conv1d_update_cpu,
)
from sgl_kernel.linear_attention import (
    chunk_gated_delta_rule_cpu as chunk_gated_delta_rule_cpu,
)
