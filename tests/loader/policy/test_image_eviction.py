"""Which images give way."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from loader.policy.image_eviction import ImageFacts, Room, make_room


def held(name, nbytes=10, last_used=0.0, **keys):
    return ImageFacts(name, nbytes, last_used, **keys)


def test_images_stay_while_there_is_room():
    assert make_room([held("a"), held("b")], taken_bytes=5, need_bytes=5, capacity_bytes=30) == Room((), 0)


def test_least_recently_used_image_is_dropped_first():
    images = [held("a", last_used=3), held("b", last_used=1), held("c", last_used=2)]
    assert make_room(images, 0, 10, 30).drop == ("b",)
    assert make_room(images, 0, 20, 30).drop == ("b", "c")


def test_image_of_an_unlisted_model_is_dropped_first_even_when_pinned():
    images = [held("a", last_used=1), held("b", last_used=9, wanted=False, pinned=True)]
    assert make_room(images, 0, 10, 20).drop == ("b",)


def test_pinned_images_and_those_in_use_are_never_dropped():
    images = [held("a", pinned=True), held("b", in_use=True), held("c", in_use=True, wanted=False)]
    assert make_room(images, 0, 10, 30) == Room((), 10)


def test_images_stay_when_dropping_them_would_not_make_enough_room():
    assert make_room([held("a"), held("b", pinned=True)], taken_bytes=10, need_bytes=25, capacity_bytes=40) == Room(
        (), 5
    )


def test_an_image_that_a_later_larger_one_made_unnecessary_stays():
    images = [held("small", 5, last_used=1), held("large", 50, last_used=2)]
    assert make_room(images, 0, 40, 60).drop == ("large",)


IMAGES = st.lists(
    st.builds(
        ImageFacts,
        name=st.just("?"),
        nbytes=st.integers(1, 20),
        last_used=st.integers(0, 5).map(float),
        pinned=st.booleans(),
        wanted=st.booleans(),
        in_use=st.booleans(),
    ),
    max_size=8,
).map(lambda images: [replace(image, name=str(number)) for number, image in enumerate(images)])


@given(images=IMAGES, taken=st.integers(0, 30), need=st.integers(0, 60), capacity=st.integers(1, 100))
def test_room_is_made_exactly_when_possible_without_dropping_images_that_could_stay(images, taken, need, capacity):
    room = make_room(images, taken, need, capacity)
    by_name = {image.name: image for image in images}
    may_go = [image for image in images if not image.in_use and not (image.pinned and image.wanted)]
    least = sum(image.nbytes for image in images) - sum(image.nbytes for image in may_go) + taken + need
    assert room.short_bytes == max(0, least - capacity)
    dropped = [by_name[name] for name in room.drop]
    assert all(image in may_go for image in dropped)
    if room.short_bytes:
        assert not dropped
        return
    left = sum(image.nbytes for image in images) + taken + need - sum(image.nbytes for image in dropped)
    assert left <= capacity
    assert all(left + image.nbytes > capacity for image in dropped)


def test_pinned_images_are_dropped_for_a_pinned_one_after_all_other_listed_ones():
    images = [held("a", pinned=True, last_used=1), held("b", last_used=9), held("c", pinned=True, last_used=2)]
    assert make_room(images, 0, 10, 30, over_pinned=True).drop == ("b",)
    assert make_room(images, 0, 20, 30, over_pinned=True).drop == ("b", "a")
    assert make_room(images, 0, 20, 30) == Room((), 10)
