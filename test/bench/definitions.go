package main

import (
	"fmt"
	"log"
	"sync"
	"time"
)

// definitionsMade is the number of CustomResourceDefinitions that are created at once.
const definitionsMade = 1000

// definitions creates CRDs while other clients read and write. It measures the latency of these clients and the time
// until the last CRD is served.
func definitions(s *server) map[string]float64 {
	round := time.Now().UnixNano()
	body := func(i int) []byte {
		return fmt.Appendf(nil, `{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition",
"metadata":{"name":"things%[1]d.g%[1]d.r%[2]d.example.com"},
"spec":{"group":"g%[1]d.r%[2]d.example.com","scope":"Namespaced",
"names":{"plural":"things%[1]d","kind":"Thing%[1]d"},"versions":[{"name":"v1","served":true,"storage":true,
"schema":{"openAPIV3Schema":{"type":"object","properties":{"spec":{"type":"object",
"properties":{"a":{"type":"string","default":"x"},"b":{"type":"integer"}},
"x-kubernetes-validations":[{"rule":"self.b < 10"}]}}}}}]}}`, i, round)
	}
	stop := make(chan struct{})
	var worst time.Duration
	var others sync.WaitGroup
	others.Go(func() {
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			at := time.Now()
			s.do("POST", "/api/v1/namespaces/default/configmaps", "",
				fmt.Appendf(nil, `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"stall-%d-%d"}}`, round, n),
				201)
			s.do("GET", "/api/v1/namespaces/default/configmaps?limit=1", "", nil, 200)
			worst = max(worst, time.Since(at))
			time.Sleep(10 * time.Millisecond)
		}
	})
	before, began := s.begin(), time.Now()
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := w; i < definitionsMade; i += 8 {
				s.do("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", "", body(i), 201)
			}
		})
	}
	wg.Wait()
	for i := range definitionsMade { // until each is served
		path := fmt.Sprintf("/apis/g%[1]d.r%[2]d.example.com/v1/namespaces/default/things%[1]d?limit=1", i, round)
		s.waitServed(path)
	}
	served := time.Since(began).Seconds()
	close(stop)
	others.Wait()
	return map[string]float64{
		"1000 definitions: until the last is served (s)":                            served,
		"1000 definitions: CPU (s)":                                                 s.cpu() - before,
		"1000 definitions: the longest that a create and a list of others took (s)": worst.Seconds(),
	}
}

// servedTimeout bounds the time until a new resource is served.
const servedTimeout = 5 * time.Minute

// waitServed waits until the path of a list is served.
func (s *server) waitServed(path string) {
	for deadline := time.Now().Add(servedTimeout); s.status("GET", path) != 200; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			log.Fatalf("%s: %s is not served after %v", s.name, path, servedTimeout)
		}
	}
}
