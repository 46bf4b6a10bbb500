package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"os/exec"
)

// children are the loads that run in processes of their own, by the program's argument. Their goroutines would delay
// the measured requests. A load runs until ctx ends. counters waits for its end, and returns its counters.
var children = map[string]func(ctx context.Context, args []string) (counters func() map[string]int64){
	"loud-tenant": runLoudTenant,
	"storm":       runStorm,
}

// childCPU is the metric of a load's own CPU time, because a load shares the machine with the servers.
const childCPU = "ms of its own CPU"

// startChild starts a load's process. stop ends it and returns its counters.
func startChild(name string, args ...string) (stop func() map[string]int64) {
	self, err := os.Executable()
	check(err)
	cmd := exec.Command(self, append([]string{name}, args...)...)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	check(err)
	var answer bytes.Buffer
	cmd.Stdout = &answer
	check(cmd.Start())
	return func() map[string]int64 {
		check(in.Close())
		check(cmd.Wait())
		got := map[string]int64{}
		check(json.Unmarshal(answer.Bytes(), &got))
		got[childCPU] = (cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()).Milliseconds()
		return got
	}
}

// runChild is a load's process. It runs until its standard input ends.
func runChild(run func(context.Context, []string) func() map[string]int64, args []string) {
	ctx, cancel := context.WithCancel(context.Background())
	counters := run(ctx, args)
	_, _ = io.Copy(io.Discard, os.Stdin)
	cancel()
	check(json.NewEncoder(os.Stdout).Encode(counters()))
}
