from benchmarks import tpu_peers, tpu_table


def test_operands_and_bytes():
    for case in tpu_table.cases():
        first, second, sizes = tpu_peers.operands(case)
        p = case.problem
        read = first.size * first.dtype.itemsize + second.size * second.dtype.itemsize
        written = {"forward": p.m * p.n, "d_lhs": p.m * p.k, "d_rhs": p.g * p.k * p.n}[case.which]
        assert case.bytes == read + written * tpu_peers.OUT[case.dtype].dtype.itemsize and sizes.sum() == p.m
        takers = [peer.name for peer in tpu_peers.PEERS.values() if peer.takes(case)]
        assert takers[0] == "ours" and (len(takers) > 1) == (case.which != "d_lhs" and case.dtype == "bf16")


def test_tilings():
    peers = tpu_peers.PEERS
    for case in (c for c in tpu_table.cases() if peers["megablox"].takes(c)):
        p = case.problem
        tried = {name: peers[name].tilings(case) for name in ("ours", "megablox", "megablox 128³", "MaxText v2")}
        assert tried["ours"] == tried["megablox 128³"] == (None,) and tried["MaxText v2"][0] is None
        assert len(tried["megablox"]) == 1
        for tm, tk, tn in filter(None, (*tried["megablox"], *tried["MaxText v2"])):
            assert tm % 128 == 0 and p.k % tk == 0 and p.n % tn == 0
