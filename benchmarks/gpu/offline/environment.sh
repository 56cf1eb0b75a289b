# Paths by which Python and the loader of libraries find packages in SRC and SITE; to be sourced with both set. The
# archive may have a torch of its own, which wants the CUDA libraries that are installed beside the host's, and a newer
# NCCL.
export PYTHONPATH="$SRC:$SITE"
if [ -d "$SITE/nvidia_cutlass_dsl/dsl_packages" ]; then PYTHONPATH="$PYTHONPATH:$SITE/nvidia_cutlass_dsl/dsl_packages"; fi
for lib in $(python3 -c "import site, glob; print(*(d for s in site.getsitepackages() for d in glob.glob(s + '/nvidia/*/lib')))"); do
    LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$lib"
done
if [ -d "$SITE/nvidia/nccl/lib" ]; then LD_LIBRARY_PATH="$SITE/nvidia/nccl/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"; fi
export LD_LIBRARY_PATH
