package main

import (
	"encoding/json"
	"fmt"
	"log"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"
)

const (
	// footprintRest is the time at rest before each measurement. A process at rest returns memory once a minute. In the
	// first minutes it compresses the added objects, and is not at rest.
	footprintRest = 200 * time.Second
	// footprintMaps is the number of ConfigMaps of 1 KB.
	footprintMaps = 10_000
	// footprintBlobs is the number of custom resources, and blobBytes is the size of a text in each.
	footprintBlobs, blobBytes = 100, 940_000
	// footprintWatches is the number of watches.
	footprintWatches = 5000
	blobsPath        = "/apis/footprint.example.com/v1/namespaces/more/blobs"
)

// addition is something that takes memory.
type addition struct {
	row string
	// units divides the growth of memory in megabytes. If it is 0, the row has all memory.
	units float64
	// add creates objects, if it is not nil. Watches, whose queries differ by query, open after it.
	add     func(*server)
	watches int
	query   func(i int) string
}

// footprint measures the memory that each addition takes, with fresh servers. crds is a directory of CRDs. It may be
// empty if -rows selects other rows.
func footprint(dir, crds string) {
	if crds == "" && *rows == "" {
		log.Fatal("-footprint: -crds is missing")
	}
	results := newMeasured(nil)
	for _, k := range selected() {
		results.servers = append(results.servers, k.name)
	}
	for i, a := range additions(crds) {
		if !isWanted(a.row) {
			continue
		}
		own := filepath.Join(dir, fmt.Sprint(i))
		check(os.Mkdir(own, 0o700))
		a.measure(own, results)
	}
	table := results.markdown(machine() + "; fresh servers for each row, after three minutes at rest. " + peers)
	fmt.Println(table)
	if *rows == "" && *only == "" {
		check(writeBetween(*out, "<!-- footprint -->", "<!-- weighed -->", table))
	}
}

// measure starts a server of each kind, and measures its memory before and after the addition.
func (a *addition) measure(dir string, results *measured) {
	var servers []*server
	for _, k := range selected() {
		s, _ := k.startIn(dir)
		defer s.stop()
		servers = append(servers, s)
	}
	before := make([]float64, len(servers))
	if a.units > 0 {
		for _, s := range servers { // the first requests of a kind take memory once
			prepare(s)
			s.addMap("first")
			s.do("GET", mapsPath, "", nil, 200)
		}
		log.Print("three minutes at rest")
		time.Sleep(footprintRest)
		for i, s := range servers {
			before[i] = s.memory()
		}
	}
	values := make([]float64, len(servers))
	var resting sync.WaitGroup
	for i, s := range servers {
		log.Printf("%s: %s", s.name, a.row)
		if a.add != nil {
			a.add(s)
		}
		open := &watches{}
		if a.watches > 0 {
			var closeAll func()
			open, closeAll = s.openAll(a.watches, a.query)
			defer closeAll()
		}
		resting.Go(func() {
			time.Sleep(footprintRest)
			s.ready()
			if n := open.open.Load(); n < int64(a.watches) {
				log.Fatalf("%s: %d of %d watches are still open", s.name, n, a.watches)
			}
			values[i] = s.memory()
		})
	}
	resting.Wait()
	for i, s := range servers {
		if a.units > 0 {
			values[i] = (values[i] - before[i]) / a.units
		}
		results.record(a.row, s.name, values[i], nil)
	}
}

func additions(crds string) []*addition {
	all := []*addition{
		{row: "idle (MB)"},
		{row: fmt.Sprintf("with %d pods of 7.6 KB and %d watches (MB)", *pods, watchesAtRest), add: func(s *server) {
			prepare(s)
			s.fill(*pods)
			s.do("GET", "/api/v1/pods", "", nil, 200)
		}, watches: watchesAtRest, query: everything},
		{row: "a ConfigMap of 1 KB (KB)", units: footprintMaps / 1e3, add: func(s *server) {
			s.each("", footprintMaps, func(i int) { s.addMap(fmt.Sprint("g", i)) })
			s.do("GET", mapsPath, "", nil, 200)
		}},
		{row: "100 custom resources of 0.94 MB (multiple of their JSON)", units: footprintBlobs * blobBytes / 1e6,
			add: createBlobs},
		{row: "a watch of a name of its own (KB)", units: footprintWatches / 1e3, watches: footprintWatches,
			query: ofAbsentName},
		{row: "an equal watch (KB)", units: footprintWatches / 1e3, watches: footprintWatches, query: everything},
	}
	if crds == "" {
		return all
	}
	bodies := definitionsOf(crds)
	return append(all, &addition{row: fmt.Sprintf("a CRD of provider-aws, %d of them (MB)", len(bodies)),
		units: float64(len(bodies)), add: func(s *server) { s.define(bodies) }})
}

// mapsPath is the path of the ConfigMaps that addMap creates.
const mapsPath = "/api/v1/namespaces/more/configmaps"

// addMap creates a ConfigMap of 1 KB.
func (s *server) addMap(name string) {
	s.do("POST", mapsPath, "", fmt.Appendf(nil,
		`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":%q},"data":{"k":%q}}`, name, settingsText(1024)), 201)
}

// settingsText returns n bytes of settings such as "cache.timeout.limit=48213;". It compresses to about a third, as
// most configuration does, and has the same length in JSON.
func settingsText(n int) string {
	words := []string{"cache", "timeout", "limit", "server", "client", "buffer", "retry", "queue", "worker", "session",
		"token", "index", "storage", "network", "metric", "level"}
	word := func() string { return words[rand.IntN(len(words))] }
	var text strings.Builder
	for text.Len() < n {
		fmt.Fprintf(&text, "%s.%s.%s=%d;", word(), word(), word(), rand.IntN(100_000))
	}
	return text.String()[:n]
}

// createBlobs creates a CRD without a schema and large custom resources, and lists them.
func createBlobs(s *server) {
	s.define([][]byte{[]byte(`{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition",
"metadata":{"name":"blobs.footprint.example.com"},"spec":{"group":"footprint.example.com","scope":"Namespaced",
"names":{"plural":"blobs","kind":"Blob"},"versions":[{"name":"v1","served":true,"storage":true,
"schema":{"openAPIV3Schema":{"type":"object","x-kubernetes-preserve-unknown-fields":true}}}]}}`)})
	s.each("", footprintBlobs, func(i int) {
		s.do("POST", blobsPath, "", fmt.Appendf(nil,
			`{"apiVersion":"footprint.example.com/v1","kind":"Blob","metadata":{"name":"b%d"},"data":%q}`, i,
			settingsText(blobBytes)), 201)
	})
	s.do("GET", blobsPath, "", nil, 200)
}

// definitionsOf returns the CRDs of a directory as JSON. The directory must have some.
func definitionsOf(dir string) [][]byte {
	files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	check(err)
	if len(files) == 0 {
		log.Fatalf("-crds=%s: the directory has no *.yaml", dir)
	}
	all := make([][]byte, len(files))
	for i, f := range files {
		text, err := os.ReadFile(f)
		check(err)
		all[i], err = yaml.YAMLToJSON(text)
		check(err)
	}
	return all
}

// define creates CRDs, and waits until all their versions are served.
func (s *server) define(crds [][]byte) {
	for _, crd := range crds {
		s.do("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", "", crd, 201)
	}
	for _, crd := range crds {
		var of apiextensionsv1.CustomResourceDefinition
		check(json.Unmarshal(crd, &of))
		for _, v := range of.Spec.Versions {
			if v.Served {
				s.waitServed(fmt.Sprintf("/apis/%s/%s/%s?limit=1", of.Spec.Group, v.Name, of.Spec.Names.Plural))
			}
		}
	}
}
