#!/bin/sh
# The comparison on a host of two or four GPUs that one has for half an hour, in a tree that came there without .git:
#   sh sitting.sh first PACK          what pack.sh made is put in place, with compare_*/slos.json beside it; the time
#                                     counts
#   sh sitting.sh begin [WORD...]     after the parts of SGLang's archive lie in /tmp/b/0, /tmp/b/1, ...; words of
#                                     compare.sh
#   sh sitting.sh look SECONDS OUT    waits until all is done, or so long; results so far come to OUT, in eight files at
#                                     most
# What is begun without words is in `left`: all systems of a slice and rate are to have the same cards. Where there are
# no targets of its slices on these, models are measured alone first.
set -eu
IN=/tmp/in
export SRC=/tmp/src SITE=/tmp/site RESULTS=/tmp/results
ENDS_S=${ENDS_S:-1740} # after `first`; the host goes back half a minute later

# left GPUS: what compare.sh is given
left() {
    # The two cells in which hosts decide (docs/lab/gpu-runs.md, "A host is not the same"), at the same seconds: with
    # OTHER=HEAD of pack.sh each pair has folders of its own.
    if [ "$1" -ge 4 ]; then
        echo "prism:hyperbolic:24 prism:quiet:6 / muxserve:hyperbolic:24 muxserve:quiet:6"
        echo "-- muxserve:hyperbolic:24 muxserve:quiet:6 / prism:hyperbolic:24 prism:quiet:6"
    else
        echo "prism:quiet:6 / muxserve:quiet:6 / prism:hyperbolic:24 / muxserve:hyperbolic:24"
    fi
}

case $1 in
    first)
        date +%s >/tmp/begun
        mkdir -p $IN /tmp/b $RESULTS
        cp -r "$2"/. $IN
        for of in $IN/compare_*; do if [ -d "$of" ]; then cp -r "$of" $RESULTS; fi; done
        nvidia-smi -L
        ;;
    begin)
        # In order of their numbers, whatever those are.
        sh "$(dirname "$0")/setup.sh" $IN $SRC $SITE $(ls -v /tmp/b/*)
        set -f
        shift
        # shellcheck disable=SC2046  # words
        [ $# -gt 0 ] || set -- $(left "$(nvidia-smi -L | wc -l)")
        sh $SRC/benchmarks/gpu/offline/compare.sh begin $(($(cat /tmp/begun) + ENDS_S - $(date +%s))) "$@"
        echo "begun $(($(date +%s) - $(cat /tmp/begun))) s after the first call"
        ;;
    look)
        sh $SRC/benchmarks/gpu/offline/compare.sh look "$2" || true
        cd $RESULTS
        find . -name 'prism*.json' ! -path '*.other.*' | tar -czf "$3/prism.tgz" -T -
        find . -name '*.json' ! -name 'prism*' -o -path '*.other.*' -name '*.json' -o -name 'log*' -o -name commands |
            tar -czf "$3/others.tgz" -T -
        # The newest, of those that may come.
        find . -name '*.logs.txz' -size -15M -printf '%T@ %p\n' | sort -rn | head -n 6 | while read -r _ path; do
            cp "$path" "$3/$(echo "$path" | tr / - | cut -c3-)"
        done
        echo "$(($(date +%s) - $(cat /tmp/begun))) s after the first call"
        ;;
    *) echo "first, begin or look, not $1" >&2; exit 2 ;;
esac
