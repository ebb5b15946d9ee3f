"""Plans past one machine: the real admission, scheduler, policy and block manager against a cost model.

`aserve simulate` (command.py) replays a trace (trace.py) through a Simulator (simulator.py) on a virtual clock and
prints a Report (report.py). No model, no sleep, no asyncio: hundreds of thousands of requests take a minute.
"""
