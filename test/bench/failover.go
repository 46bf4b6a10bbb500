package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"watershed.dev/platform/eventlog"
	"watershed.dev/test/harness"
)

// failover kills the leader of the event log, of three NATS servers, again and again, or stops it. It prints the
// distribution of the longest time that an event needed to reach a watch afterwards.
func failover(dir string, kills int, stop bool) {
	signal := syscall.SIGKILL
	if stop {
		signal = syscall.SIGTERM
	}
	s := startPlacement("split", dir, "split", *watershed, "--replicas=nats=3")
	defer s.stop()
	data := filepath.Join(dir, "w")
	config, err := clientcmd.BuildConfigFromFlags("", filepath.Join(data, "admin.kubeconfig"))
	check(err)
	config.QPS = -1
	client := kubernetes.NewForConfigOrDie(config)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	leader := logLeader(ctx, data)
	oldest := eventAges(ctx, client)
	var ages []time.Duration
	for n := range kills {
		name := leader()
		oldest.Store(0)
		pid, err := os.ReadFile(filepath.Join(data, name+".pid"))
		check(err)
		number, err := strconv.Atoi(strings.TrimSpace(string(pid)))
		check(err)
		check(syscall.Kill(number, signal))
		time.Sleep(12 * time.Second) // longer than an election of NATS' defaults
		ages = append(ages, time.Duration(oldest.Load()))
		log.Printf("%v %d of %d, %s: %v", signal, n+1, kills, name, ages[n].Round(time.Millisecond))
	}
	fmt.Printf("%v, the oldest event after each of %d, ms: p50 %.0f, p90 %.0f, p99 %.0f, most %.0f\n", signal, kills,
		percentile(ages, 50), percentile(ages, 90), percentile(ages, 99), percentile(ages, 100))
}

// logLeader returns a function that waits until all copies of the log are current, and returns the leader's name.
func logLeader(ctx context.Context, data string) func() string {
	js, err := harness.RegistryJetStream(data)
	check(err)
	return func() string {
		for ; ; time.Sleep(100 * time.Millisecond) {
			stream, err := js.Stream(ctx, eventlog.StreamName)
			if err != nil {
				continue
			}
			c := stream.CachedInfo().Cluster
			if c != nil && c.Leader != "" && len(c.Replicas) == 2 &&
				!slices.ContainsFunc(c.Replicas, func(p *jetstream.PeerInfo) bool { return !p.Current || p.Offline }) {
				return c.Leader
			}
		}
	}
}

// eventAges changes an object every 10 ms, and watches it. It returns the age of the oldest event that the watch has
// received since its caller set it to 0, in nanoseconds.
func eventAges(ctx context.Context, client kubernetes.Interface) *atomic.Int64 {
	api := client.CoreV1().ConfigMaps("default")
	object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "failover"}}
	_, err := api.Create(ctx, object, metav1.CreateOptions{})
	check(err)
	w, err := api.Watch(ctx, metav1.ListOptions{FieldSelector: "metadata.name=failover"})
	check(err)
	var oldest atomic.Int64
	go func() {
		for e := range w.ResultChan() {
			c, ok := e.Object.(*corev1.ConfigMap)
			switch {
			case ctx.Err() != nil:
				return
			case !ok:
				log.Panicf("the watch ends: %v", e.Object)
			}
			if at, err := strconv.ParseInt(c.Data["at"], 10, 64); err == nil {
				oldest.Store(max(oldest.Load(), time.Now().UnixNano()-at))
			}
		}
		if ctx.Err() == nil {
			log.Panic("the watch ended")
		}
	}()
	go func() {
		for ctx.Err() == nil {
			patch := fmt.Appendf(nil, `{"data":{"at":"%d"}}`, time.Now().UnixNano())
			if _, err := api.Patch(ctx, "failover", types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
				log.Printf("a write failed: %v", err)
			}
			time.Sleep(10 * time.Millisecond)
		}
	}()
	return &oldest
}
