package main

import (
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// piece is a piece of work. do runs it and returns values by row.
type piece struct {
	name string
	do   func(*server) map[string]float64
}

// work is the list of work. The servers alternate within each piece.
var work = []piece{
	{"LIST pods, JSON", func(s *server) map[string]float64 {
		return s.lists("LIST pods, JSON (CPU ms/MB)", "application/json", 0)
	}},
	{"LIST pods, protobuf", func(s *server) map[string]float64 {
		return s.lists("LIST pods, protobuf (CPU ms/MB)", "application/vnd.kubernetes.protobuf", 0)
	}},
	{"LIST pods, Table", func(s *server) map[string]float64 {
		return s.lists("LIST pods, Table (CPU ms/MB)", "application/json;as=Table;v=v1;g=meta.k8s.io", 0)
	}},
	{"LIST pods, gzip", (*server).compressedLists},
	{"LIST pages of 500, JSON", func(s *server) map[string]float64 {
		return s.lists("LIST pages of 500, JSON (CPU ms/MB)", "application/json", 500)
	}},
	{"GET a pod", getPods},
	{"GET a pod again", getPodsAgain},
	{"renew a Lease", renewLeases},
	{"create a ConfigMap", createConfigMaps},
	{"create a pod", createPods},
	{"create by a token's user", admitted},
	{"a consistent LIST of one small object", smallList},
	{"deliver to 1000", func(s *server) map[string]float64 { return deliver(s, 1000, 40, 200) }},
	{"deliver to 5000", func(s *server) map[string]float64 { return deliver(s, 5000, 10, 50) }},
	{"herd", herd},
	{"pods written to etcd", stream},
	{"definitions", definitions},
	{"a relist storm", func(s *server) map[string]float64 { return storm(s, "relist") }},
	{"a watch-list storm", func(s *server) map[string]float64 { return storm(s, "watch-list") }},
	{"a reconnect storm", func(s *server) map[string]float64 { return storm(s, "reconnect") }},
	{"a loud tenant", tenant},
}

// podsRead is the number of pods that a row reads.
const podsRead = 2000

// getPods reads pods that no request has read before. After the last pod it starts again.
func getPods(s *server) map[string]float64 {
	s.firstRead = s.read
	s.read += podsRead
	return s.each("GET a pod, JSON (CPU ms)", podsRead, s.readPod)
}

// getPodsAgain reads the pods of the previous read again.
func getPodsAgain(s *server) map[string]float64 {
	if s.read == 0 {
		getPods(s)
	}
	return s.each("GET a pod that was read before, JSON (CPU ms)", podsRead, s.readPod)
}

func (s *server) readPod(i int) {
	s.do("GET", fmt.Sprintf("/api/v1/namespaces/bench/pods/p%d", (s.firstRead+i)%*pods), "", nil, 200)
}

// each makes n calls, 16 in flight, and returns CPU milliseconds per call.
func (s *server) each(row string, n int, f func(i int)) map[string]float64 {
	before := s.begin()
	var next atomic.Int64
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				f(i)
			}
		})
	}
	wg.Wait()
	return map[string]float64{row: (s.cpu() - before) * 1000 / float64(n)}
}

var serial atomic.Int64

// renewLeases renews Leases as nodes do, in JSON: each has its node as owner, and an update sends the last response
// with another time.
func renewLeases(s *server) map[string]float64 {
	const path = "/apis/coordination.k8s.io/v1/namespaces/bench/leases"
	type held struct {
		sync.Mutex
		coordinationv1.Lease
	}
	leases := make([]held, 16)
	for i := range leases {
		check(json.Unmarshal(s.do("GET", fmt.Sprintf("%s/l%d", path, i), "", nil, 200), &leases[i].Lease))
		holder, seconds := "h", int32(40)
		leases[i].Spec.HolderIdentity, leases[i].Spec.LeaseDurationSeconds = &holder, &seconds
		leases[i].OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "h",
			UID: types.UID(fmt.Sprint(i))}}
	}
	return s.each("renew a Lease (CPU ms)", 2000, func(i int) {
		l := &leases[i%16]
		l.Lock()
		defer l.Unlock()
		l.Spec.RenewTime = &metav1.MicroTime{Time: time.Now()}
		body, err := json.Marshal(&l.Lease)
		check(err)
		l.Lease = coordinationv1.Lease{}
		check(json.Unmarshal(s.do("PUT", fmt.Sprintf("%s/l%d", path, i%16), "", body, 200), &l.Lease))
	})
}

func createConfigMaps(s *server) map[string]float64 {
	return s.each("create a ConfigMap of 512 B (CPU ms)", 1000, func(int) {
		s.do("POST", "/api/v1/namespaces/bench/configmaps", "",
			[]byte(fmt.Sprintf(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"c%d"},"data":{"k":%q}}`,
				serial.Add(1), strings.Repeat("x", 512))), 201)
	})
}

func createPods(s *server) map[string]float64 {
	return s.each("create a pod of 7.6 KB (CPU ms)", 500, func(int) {
		s.do("POST", "/api/v1/namespaces/more/pods", "", pod(fmt.Sprintf("m%d", serial.Add(1))), 201)
	})
}

func smallList(s *server) map[string]float64 {
	var all []time.Duration
	for range 100 {
		at := time.Now()
		s.do("GET", "/api/v1/namespaces/small/configmaps", "", nil, 200)
		all = append(all, time.Since(at))
	}
	return map[string]float64{"a consistent LIST of one small object, idle: p50 (ms)": percentile(all, 50)}
}

// prepare creates the namespaces of the work, and objects that no row counts.
func prepare(s *server) {
	for _, ns := range []string{"bench", "more", "events", "small"} {
		s.do("POST", "/api/v1/namespaces", "",
			[]byte(fmt.Sprintf(`{"apiVersion":"v1","kind":"Namespace","metadata":{"name":%q}}`, ns)), 201)
		s.do("POST", "/api/v1/namespaces/"+ns+"/serviceaccounts", "",
			[]byte(`{"apiVersion":"v1","kind":"ServiceAccount","metadata":{"name":"default"}}`), 201)
	}
	s.do("POST", "/api/v1/namespaces/small/configmaps", "",
		[]byte(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"one"}}`), 201)
	for i := range 16 {
		s.do("POST", "/apis/coordination.k8s.io/v1/namespaces/bench/leases", "",
			[]byte(fmt.Sprintf(`{"apiVersion":"coordination.k8s.io/v1","kind":"Lease","metadata":{"name":"l%d"}}`, i)),
			201)
	}
	time.Sleep(time.Second) // admission's informers receive the service accounts
}

// fill creates the n pods of the lists.
func (s *server) fill(n int) {
	s.each("", n, func(i int) {
		s.do("POST", "/api/v1/namespaces/bench/pods", "", pod(fmt.Sprintf("p%d", i)), 201)
	})
}

// pod returns a pod of about 7.6 KB as JSON. Most of it is the container spec.
func pod(name string) []byte {
	var env []string
	for i := range 40 {
		env = append(env, fmt.Sprintf(`{"name":"VARIABLE_%d","value":"a value of some length for variable %d"}`, i, i))
	}
	return []byte(fmt.Sprintf(`{"apiVersion":"v1","kind":"Pod","metadata":{"name":%q,
"labels":{"app":"bench","tier":"web"},"annotations":{"note":%q}},
"spec":{"containers":[{"name":"c","image":"registry.example/app:1.2.3","env":[%s],
"resources":{"requests":{"cpu":"10m","memory":"16Mi"}}}]}}`, name, strings.Repeat("n", 800), strings.Join(env, ",")))
}
