"""How others reach balloond: the handoff socket for processes that use memory, gRPC for services and operators."""
