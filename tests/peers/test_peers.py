"""What peers.py computes without a GPU: python3 -m unittest discover tests/peers"""

import json
import pathlib
import tempfile
import unittest

import peers

FIXTURE = pathlib.Path(__file__).parents[2] / "xtask" / "fixtures" / "bench.json"


class Tables(unittest.TestCase):
    def test_routing_has_different_experts_for_a_token_and_is_seeded(self):
        ids = peers.random_routing(50, 7, 3, 1)
        for token in range(50):
            self.assertEqual(len(set(ids[3 * token : 3 * token + 3])), 3)
        self.assertTrue(set(ids) <= set(range(7)))
        self.assertEqual(ids, peers.random_routing(50, 7, 3, 1))
        self.assertNotEqual(ids, peers.random_routing(50, 7, 3, 2))

    def test_entries_are_sorted_by_expert_and_then_by_place(self):
        # Expert 1 has nothing.
        order, places, ends = peers.sorted_entries([3, 0, 2, 0, 3, 2], 4)
        self.assertEqual(order, [1, 3, 2, 5, 0, 4])
        self.assertEqual([order[place] for place in places], list(range(6)))
        self.assertEqual(ends, [2, 2, 4, 6])

    def test_blocks_are_padded_with_an_entry_that_does_not_exist(self):
        entries, owners = peers.padded_blocks([3, 0, 2, 0, 3, 3], 4, 2)
        self.assertEqual(entries, [1, 3, 2, 6, 0, 4, 5, 6])
        self.assertEqual(owners, [0, 2, 3, 3])

    def test_more_batches_where_less_is_read(self):
        self.assertEqual(peers.batches_of(60, 10, 8, 2, 1), 12)
        self.assertEqual(peers.batches_of(60, 10, 8, 2, 1000), 3)
        self.assertEqual(peers.batches_of(60, 1000, 8, 2, 1), 2)
        self.assertEqual(peers.batches_of(60, 1, 8, 2, 1), 32)


class Bench(unittest.TestCase):
    def read(self, text):
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(text)
            file.flush()
            return peers.read_bench(file.name)

    def test_shapes_are_those_of_the_bench(self):
        shapes, gpu = peers.read_bench(FIXTURE)
        shape = {"shape": "small-1", "hidden": 1024, "intermediate": 512, "experts": 8, "topk": 2, "limit": None}
        self.assertEqual((shapes, gpu), ([{**shape, "tokens": [4, 1024]}], "A GPU"))
        self.assertEqual(peers.limit_of("SwiGLU with limit 10"), 10.0)

    def test_bad_files_are_named(self):
        missing = json.loads(FIXTURE.read_text())
        del missing["shapes"][0]["topk"]
        cases = [("{", "cannot read"), ("[]", "format None"), ('{"format": "x"}', "'x'"), (json.dumps(missing), "topk")]
        for text, part in cases:
            with self.assertRaisesRegex(peers.Unusable, part):
                self.read(text)


if __name__ == "__main__":
    unittest.main()
