import shutil
def test_x(small_run):
    shutil.copytree(small_run, "/tmp/drafts/small", symlinks=True)
