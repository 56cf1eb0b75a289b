from protos import common_pb2
from services.wording import enums


def test_enum_value_that_is_unknown_is_named_by_its_number():
    assert enums.name(common_pb2.Residency, common_pb2.ON_DISK) == "on_disk"
    assert enums.name(common_pb2.Residency, 99) == "99"
