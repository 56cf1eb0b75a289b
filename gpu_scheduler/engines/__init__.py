"""Engine processes as the gpu_scheduler sees them (`engine`, `warm_pool`), and the two kinds of engine: `sglang` and
`echo`.

An engine is a child process that speaks protos/engine.proto over an inherited socket. The kinds are started by module
name, so that nothing of SGLang is imported outside the engine's own process.
"""
