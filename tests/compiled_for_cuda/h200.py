"""An H200 that is not there, for which JAX's compiler for NVIDIA GPUs makes programs.

It needs the wheels of JAX's CUDA plugin and a `ptxas`, and neither a GPU nor a driver. What it makes cannot run here.
"""

import os
import pathlib
import shutil
import site
import tempfile

# Here the compiler leaves the assembly of its kernels, `*.ptx` with the module's name in theirs.
_dumped = tempfile.TemporaryDirectory(prefix="ampx-compiled-for-cuda-")
KERNELS = pathlib.Path(_dumped.name)

os.environ["JAX_PLATFORMS"] = "cpu"
# Without a device there is nothing to time candidates on.
_flags = f"--xla_gpu_autotune_level=0 --xla_dump_to={KERNELS}"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flags}".strip()

# What the compiler asks of a device, from NVIDIA's data sheet of the H200 SXM and the programming guide's table of
# compute capability 9.0; a text of XLA's message `GpuTargetConfigProto`.
TARGET = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
"""


class CannotCompileError(Exception):
    """What is needed to compile for CUDA is not installed."""


def devices(count):
    """Return this many H200s that are not there."""
    try:
        import jax_plugins.xla_cuda12 as plugin
    except ImportError as error:
        raise CannotCompileError("JAX's CUDA plugin is not installed (jax-cuda12-plugin, jax-cuda12-pjrt)") from error
    _find_ptxas()
    import jax
    from jax._src import xla_bridge
    from jax._src.lib import xla_client
    from jax.experimental import topologies

    jax.devices()  # of the CPU: JAX's own registration of the plugin ends where there is no CUDA library
    if not xla_client.pjrt_plugin_loaded("cuda"):
        library = pathlib.Path(plugin.__file__).parent / "xla_cuda_plugin.so"
        xla_bridge.register_plugin("cuda", library_path=str(library), priority=0)
    if not xla_client.pjrt_plugin_initialized("cuda"):
        xla_client.initialize_pjrt_plugin("cuda")
    # JAX refuses "cuda" as the name of a platform that has no device (jax-ml/jax#23971).
    of_devices = xla_bridge.canonicalize_platform
    xla_bridge.canonicalize_platform = lambda name: "cuda" if name in ("cuda", "gpu") else of_devices(name)
    topology = f"1x1x{count}"
    return topologies.get_topology_desc(
        f"h200:{topology}", platform="cuda", target_config=TARGET, topology=topology
    ).devices


def _find_ptxas():
    """Put NVIDIA's assembler on the path, on which the compiler looks for it."""
    for folder in site.getsitepackages():
        for path in pathlib.Path(folder).glob("nvidia/*/bin/ptxas"):
            os.environ["PATH"] = f"{path.parent}{os.pathsep}{os.environ['PATH']}"
    if shutil.which("ptxas") is None:
        raise CannotCompileError("there is no ptxas (nvidia-cuda-nvcc-cu12)")
