package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"log"
	"maps"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"time"

	"go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
)

const (
	streamNamespaces = 50
	streamWriters    = 25
	// streamRate is the number of writes a second for each processor. Upstream's watch cache delays the events of
	// 26,400 writes a second on 24 processors by 969 ms (kubernetes/kubernetes#139440).
	streamRate = 1100
	// streamTime is the duration of each part.
	streamTime = 5 * time.Second
	// streamTimeout bounds how late the last event of a part may be.
	streamTimeout = time.Minute
)

// streamPrefix is the prefix of the keys of the pods.
const streamPrefix = "/registry/pods/stream-"

// stages are the stages of an event by the process of split that has them, from etcd to the client. The registries also
// read the log, for the services that decide.
var stages = map[string]string{
	"registry": "the publisher", "nats": "the log", "watchfanout": "the replicas", "gateway": "the gateways"}

// change writes a pod to etcd and returns the revisions. value is the pod in two states. The events of a deletion and a
// creation have the age of the deletion.
type change func(client *clientv3.Client, key string, value [2]string, n int) []int64

var changes = map[string]change{
	"deleted and created": func(client *clientv3.Client, key string, value [2]string, _ int) []int64 {
		deleted, err := client.Delete(context.Background(), key)
		check(err)
		return append(put(client, key, value[0]), deleted.Header.Revision)
	},
	"changed": func(client *clientv3.Client, key string, value [2]string, n int) []int64 {
		return put(client, key, value[n%2])
	},
}

func put(client *clientv3.Client, key, value string) []int64 {
	resp, err := client.Put(context.Background(), key, value)
	check(err)
	return []int64{resp.Header.Revision}
}

// stream measures the events of pods: their cost at the highest rate, and their age at streamRate. It writes to etcd,
// so that the cost has no part of a request. The scenario is upstream's BenchmarkStoreWriteThroughput. A watch of a
// single namespace receives a fiftieth of the events.
func stream(s *server) map[string]float64 {
	client, err := clientv3.New(s.etcd())
	check(err)
	defer client.Close()
	pods := storedPods(client)
	defer func() { // lists of all pods follow
		_, err := client.Delete(context.Background(), streamPrefix, clientv3.WithPrefix())
		check(err)
	}()
	out := map[string]float64{}
	for _, name := range slices.Sorted(maps.Keys(changes)) {
		before, began := s.usage(), time.Now()
		n, ages := s.streamed(client, pods, changes[name], 0)
		row := "pods written to etcd, " + name
		used, took := s.usage(), time.Since(began).Seconds()
		for process := range used {
			used[process] -= before[process]
		}
		maps.Copy(out, eventRows(row, used, n))
		out[row+": events a second"] = n / took
		out[row+": age p99 (ms)"] = percentile(ages, 99)
		perSecond := streamRate * runtime.NumCPU()
		_, ages = s.streamed(client, pods, changes[name], perSecond)
		out[fmt.Sprintf("%s, %d a second: age p99 (ms)", row, perSecond)] = percentile(ages, 99)
	}
	return out
}

// eventRows returns the rows of the processor time that n events took, in all processes and in the stages of split.
func eventRows(row string, used map[string]float64, n float64) map[string]float64 {
	out := map[string]float64{row + " (CPU µs an event)": sum(used) * 1e6 / n}
	if _, split := used["registry"]; split {
		for process, stage := range stages {
			out[row+", "+stage+" (CPU µs an event)"] = used[process] * 1e6 / n
		}
	}
	return out
}

// storedPod is a pod's key, and its value in two states.
type storedPod struct {
	key   string
	value [2]string
}

// storedPods writes pods to etcd, and returns them. Each namespace has the same number.
func storedPods(client *clientv3.Client) (all []storedPod) {
	resp, err := client.Get(context.Background(), "/registry/pods/bench/p0")
	check(err)
	serializer := protobuf.NewSerializer(scheme.Scheme, scheme.Scheme)
	decoded, _, err := serializer.Decode(resp.Kvs[0].Value, nil, nil)
	check(err)
	encoder := scheme.Codecs.EncoderForVersion(serializer, corev1.SchemeGroupVersion)
	for i := range max(*pods/streamNamespaces, 1) * streamNamespaces {
		p := decoded.(*corev1.Pod).DeepCopy()
		p.Namespace, p.Name = fmt.Sprintf("stream-%d", i%streamNamespaces), fmt.Sprintf("s%d", i)
		p.UID, p.Spec.NodeName = types.UID(p.Name), fmt.Sprintf("node-%d", i%5000)
		of := storedPod{key: "/registry/pods/" + p.Namespace + "/" + p.Name}
		for state := range of.value {
			metav1.SetMetaDataAnnotation(&p.ObjectMeta, "state", strconv.Itoa(state))
			data, err := apiruntime.Encode(encoder, p)
			check(err)
			of.value[state] = string(data)
		}
		put(client, of.key, of.value[0])
		all = append(all, of)
	}
	return all
}

// streamed changes pods for streamTime, and waits for the last event. It returns the number of events, and the ages of
// the events that the watch has received. perSecond is the rate of writes; 0: as many as etcd takes.
func (s *server) streamed(client *clientv3.Client, pods []storedPod, do change, perSecond int) (n float64,
	ages []time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), streamTime+streamTimeout)
	defer cancel()
	watched := pods[0].key
	from := put(client, watched, pods[0].value[0])[0]
	received := s.watchPods(ctx, "stream-0", from)
	var mu sync.Mutex
	sent := map[int64]time.Time{}
	written := 0
	var wg sync.WaitGroup
	end := time.Now().Add(streamTime)
	for w := range streamWriters {
		wg.Go(func() {
			for i, next := w, time.Now(); time.Now().Before(end); i += streamWriters {
				now := time.Now()
				revisions := do(client, pods[i%len(pods)].key, pods[i%len(pods)].value, i/len(pods))
				mu.Lock()
				written += len(revisions)
				for _, r := range revisions {
					sent[r] = now
				}
				mu.Unlock()
				if perSecond > 0 {
					next = next.Add(time.Second * streamWriters * time.Duration(len(revisions)) /
						time.Duration(perSecond))
					time.Sleep(time.Until(next))
				}
			}
		})
	}
	wg.Wait()
	last := put(client, watched, pods[0].value[1])[0]
	for e := range received {
		if at, ok := sent[e.revision]; ok {
			ages = append(ages, e.at.Sub(at))
		}
		if e.revision == last {
			return float64(written), ages
		}
	}
	log.Fatalf("%s: the watch ended before the last of %d events", s.name, written)
	return 0, nil
}

// arrival is the time at which an event has arrived.
type arrival struct {
	revision int64
	at       time.Time
}

// watchPods watches the pods of a namespace from a revision on. The channel is closed when the watch ends.
func (s *server) watchPods(ctx context.Context, namespace string, from int64) <-chan arrival {
	path := fmt.Sprintf("/api/v1/namespaces/%s/pods?watch=true&resourceVersion=%d", namespace, from)
	resp, err := s.openWatch(ctx, s.client, path, "")
	if err != nil {
		log.Fatalf("%s: the watch does not open: %v", s.name, err)
	}
	received := make(chan arrival, 1<<20)
	go func() {
		defer close(received)
		defer resp.Body.Close()
		lines := bufio.NewReaderSize(resp.Body, 64<<10)
		for {
			line, err := lines.ReadSlice('\n')
			if err != nil {
				return
			}
			const field = `"resourceVersion":"`
			_, rest, _ := bytes.Cut(line, []byte(field))
			digits, _, _ := bytes.Cut(rest, []byte(`"`))
			if revision, err := strconv.ParseInt(string(digits), 10, 64); err == nil {
				received <- arrival{revision, time.Now()}
			}
		}
	}()
	return received
}
