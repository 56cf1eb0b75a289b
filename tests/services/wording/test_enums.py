from protos import common_pb2
from services.wording import enums


def test_a_value_of_a_newer_process_is_its_number():
    assert enums.name(common_pb2.Residency, common_pb2.ON_DISK) == "on_disk"
    assert enums.name(common_pb2.Residency, 99) == "99"
