from ajgrpo.inference.protocol import SamplingParams, WeightSpan
from ajgrpo.server.scheduler import Generation, Scheduler, Segment, pack_rows, round_up, segments


def generation(*prompt: int, max_tokens: int = 3, **params) -> Generation:
    return Generation(list(prompt), SamplingParams(**params), max_tokens, frozenset({2}))


def test_first_come_first_served_and_preempted_first_again():
    scheduler = Scheduler(2)
    a, b, c = generation(1), generation(3), generation(4)
    for item in (a, b, c):
        scheduler.submit(item)
    assert scheduler.admit() == [a, b]
    assert (a.slot, b.slot, c.slot) == (0, 1, None)
    assert scheduler.admit() == []
    scheduler.release(a)
    assert scheduler.admit() == [c]
    assert c.slot == 0
    assert scheduler.preempt_all() == 2
    assert list(scheduler.waiting) == [b, c]
    assert scheduler.running == {}
    assert len(scheduler.admit()) == 2


def test_release_of_a_waiting_request():
    scheduler = Scheduler(1)
    a, b = generation(1), generation(3)
    scheduler.submit(a)
    scheduler.submit(b)
    scheduler.release(a)
    scheduler.release(a)
    assert scheduler.admit() == [b]


def test_live_tokens_and_longest_count_prompt_and_output():
    scheduler = Scheduler(2)
    a, b = generation(1, 3, 4), generation(5)
    a.tokens = [6, 7]
    scheduler.submit(a)
    scheduler.submit(b)
    assert (scheduler.live_tokens, scheduler.longest) == (0, 0)
    scheduler.admit()
    assert (scheduler.live_tokens, scheduler.longest) == (6, 5)


def test_equal_sequences_are_forwarded_once_and_the_last_token_never():
    a, b, c, d = generation(1, 3, 4), generation(1, 3, 5), generation(9), generation(1, 3)
    d.tokens = [8]
    for slot, item in enumerate((a, b, c, d)):
        item.slot = slot
    assert segments([a, b, c, d]) == [Segment((1, 3), (0, 1, 3))]


def test_rows_are_filled_in_order():
    items = [Segment(tuple(range(size)), (size,)) for size in (3, 4, 2, 9, 1)]
    assert [[len(s.tokens) for s in row] for row in pack_rows(items, 7)] == [[3, 4], [2], [9], [1]]
    assert list(pack_rows([], 7)) == []


def test_round_up_doubles_to_the_limit():
    assert [round_up(n, 64, 200) for n in (1, 64, 65, 129, 200)] == [64, 64, 128, 200, 200]


def test_finish_reason_and_spans():
    item = generation(1, max_tokens=3)
    assert item.finish_reason is None
    for token, version in ((5, "a"), (6, "a"), (7, "b")):
        item.tokens.append(token)
        item.mark_version(version)
    assert item.finish_reason == "length"
    assert item.spans == [WeightSpan("a", 0, 2), WeightSpan("b", 2, 3)]
    item.tokens[-1] = 2
    assert item.finish_reason == "stop"
