"""Scratch: our step against DDP's, interleaved in the same processes."""

import argparse, os, time, torch, threading, multiprocessing as mp
import torch.distributed as dist
from torch import nn
from everstep.actors.groups import Rendezvous, RendezvousServer, form_group
from everstep.actors.reduction import Reducer


def mlp(w, layers):
    torch.manual_seed(0)
    mods = []
    for _ in range(layers):
        mods += [nn.Linear(w, w), nn.ReLU()]
    return nn.Sequential(*mods)


def main(rank, a, port, store_port):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{store_port}", rank=rank, world_size=a.world
    )
    group = form_group(
        torch.device("cpu"),
        Rendezvous(
            host="127.0.0.1",
            port=port,
            prefix="p",
            rank=rank,
            world_size=a.world,
            bind_ip="127.0.0.1",
            timeout_s=30,
        ),
    )
    V = a.world * a.k
    shares = [list(range(r * a.k, (r + 1) * a.k)) for r in range(a.world)]
    x = torch.randn(a.batch, a.width)
    runs = {}
    ddp = nn.parallel.DistributedDataParallel(mlp(a.width, a.layers), bucket_cap_mb=25)
    opt = torch.optim.SGD(ddp.parameters(), lr=1e-4)

    def ddp_step():
        opt.zero_grad()
        for i in range(a.k):
            if i < a.k - 1:
                with ddp.no_sync():
                    ddp(x).square().mean().backward()
            else:
                ddp(x).square().mean().backward()
        opt.step()

    runs["ddp"] = ddp_step

    def add(name, strategy, mb):
        m = mlp(a.width, a.layers)
        o = torch.optim.SGD(m.parameters(), lr=1e-4)
        r = Reducer(
            list(m.named_parameters()), [], logical_shards=V, strategy=strategy, bucket_bytes=int(mb * 2**20)
        )

        def step():
            r.attach(group, shares)
            for s in shares[rank]:
                r.begin_shard(s, last=s == shares[rank][-1])
                loss = m(x).square().mean()
                r.backward_final()
                loss.backward()
                r.end_shard()
            r.flush()
            r.wait()
            bits = r.vote_bits()
            group.all_reduce(bits)
            r.install(bits)
            o.step()
            o.zero_grad()
            r.start_step()

        runs[name] = step

    for spec in a.ours.split(","):
        strategy, mb = spec.split(":")
        add(spec, strategy, float(mb))
    names = list(runs)
    times = {n: [] for n in names}
    cpu = {n: 0.0 for n in names}
    main_cpu = {n: 0.0 for n in names}
    faults = {n: 0 for n in names}
    import resource

    begin = time.perf_counter()
    stop = torch.zeros(1)
    for i in range(a.steps + 3):
        stop[0] = time.perf_counter() - begin > a.seconds
        dist.broadcast(stop, 0)
        if stop[0]:
            break
        order = names[i % len(names) :] + names[: i % len(names)]
        for n in order:
            dist.barrier()
            f0 = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            th = time.thread_time()
            c, t = time.process_time(), time.perf_counter()
            runs[n]()
            if i >= 3:
                times[n].append(time.perf_counter() - t)
                cpu[n] += time.process_time() - c
                main_cpu[n] += time.thread_time() - th
                faults[n] += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - f0
    if rank == 0:
        base = sorted(times["ddp"])[len(times["ddp"]) // 2]
        for n in names:
            ts = sorted(times[n])
            pair = sorted(u / v for u, v in zip(times[n], times["ddp"]))
            print(
                f"{n:14s} n={len(ts)} median {ts[len(ts) // 2] * 1e3:7.1f} ms  p10 {ts[len(ts) // 10] * 1e3:7.1f}  ratio {ts[len(ts) // 2] / base:.3f}  paired {pair[len(pair) // 2]:.3f} p10-ratio {ts[len(ts) // 10] / sorted(times['ddp'])[len(ts) // 10]:.3f} cpu {cpu[n] / len(ts) * 1e3:.1f} main {main_cpu[n] / len(ts) * 1e3:.1f} faults {faults[n] // len(ts)} ({cpu[n] / cpu['ddp']:.3f})",
                flush=True,
            )
        for t in os.listdir("/proc/self/task"):
            f = open(f"/proc/self/task/{t}/stat").read().split()
            print(open(f"/proc/self/task/{t}/comm").read().strip(), "user", f[13], "sys", f[14], "ticks")
    dist.barrier()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--world", type=int, default=4)
    p.add_argument("--k", type=int, default=1)
    p.add_argument("--width", type=int, default=1830)
    p.add_argument("--layers", type=int, default=3)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--seconds", type=float, default=45)
    p.add_argument("--ours", default="ordered:25,fast:25")
    a = p.parse_args()
    server = RendezvousServer("127.0.0.1")
    import socket

    s = socket.create_server(("127.0.0.1", 0))
    sp = s.getsockname()[1]
    s.close()
    ps = [mp.get_context("fork").Process(target=main, args=(r, a, server.port, sp)) for r in range(a.world)]
    [q.start() for q in ps]
    [q.join() for q in ps]
