"""What the fork server of `parity_world` imports once, so that the ranks need not. Import it nowhere else."""

import logging
import warnings

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch  # noqa: E402

torch.set_num_threads(1)

from megatron_patches import cpu  # noqa: E402

cpu.install()

import megatron.core.distributed  # noqa: E402, F401
import megatron.core.models.gpt.gpt_layer_specs  # noqa: E402, F401
import megatron.core.models.gpt.gpt_model  # noqa: E402, F401
import megatron.core.optimizer  # noqa: E402, F401
import megatron.core.pipeline_parallel  # noqa: E402, F401
