import asyncio

from prismctl.views.terminal import told_meanwhile


async def test_long_work_is_announced_while_it_runs(capsys):
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    waiting = loop.create_task(told_meanwhile(done, "it leaves", after_s=0.0))
    while not (said := capsys.readouterr().err):
        await asyncio.sleep(0)
    assert said == "prismctl: it leaves\n" and not waiting.done()
    done.set_result(7)
    assert await waiting == 7


async def test_finished_work_is_not_announced(capsys):
    done = asyncio.get_running_loop().create_future()
    done.set_result(7)
    assert await told_meanwhile(done, "it leaves") == 7
    assert capsys.readouterr().err == ""
