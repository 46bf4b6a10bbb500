package main

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"watershed.dev/test/robustness/history"
)

const (
	namespace = "robust"
	// ours begins the names of the objects in the histories. Clients ignore other objects.
	ours = "robust-"
)

// shards are the values of the label shard. Watches and lists select objects by it.
var shards = []string{"x", "y", "z"}

// resource is a resource that the clients write, read and watch.
type resource struct {
	name, kind string
	// path is the path of the collection, and everywhere the path of the collection in all namespaces.
	path, everywhere string
	// prefix is the etcd key of an object without its name.
	prefix string
	// objects is the number of objects. If they stay, clients do not delete them.
	objects int
	stay    bool
	// typed: an object has its shard also as its type, which clients can select by a field. It does not change.
	typed bool
	// writers, readers, watchers and late are the numbers of clients. late are the clients that resume old watches.
	writers, readers, watchers, late int

	history *history.History
	known   revisions
	// positions are the last revisions that the watches have received.
	positions []atomic.Int64
	// final is the revision that every watch must reach; 0 until it is set.
	final atomic.Int64
}

// resources returns the resources of a run: config maps with most of the clients, secrets without watches for most of
// the time, and namespaces.
func resources(o options) []*resource {
	all := []*resource{
		{name: "configmaps", kind: "ConfigMap", objects: 24,
			writers: o.writers, readers: 4, watchers: o.watchers, late: 4},
		{name: "secrets", kind: "Secret", objects: 24, typed: true,
			writers: 2, readers: 2, late: 2},
		{name: "namespaces", kind: "Namespace", objects: 3, stay: true,
			writers: 1, readers: 1, watchers: 3, late: 1},
	}
	for _, x := range all {
		x.everywhere = "/api/v1/" + x.name
		x.path, x.prefix = "/api/v1/namespaces/"+namespace+"/"+x.name, "/registry/"+x.name+"/"+namespace+"/"
		if x.kind == "Namespace" {
			x.path, x.prefix = x.everywhere, "/registry/namespaces/"
		}
		x.history, x.positions = history.New(), make([]atomic.Int64, x.watchers)
	}
	return all
}

// key returns the name of an object.
func (x *resource) key(r *rand.Rand) string { return ours + strconv.Itoa(r.IntN(x.objects)) }

// shardOf returns the shard of an object's next state.
func (x *resource) shardOf(key string, r *rand.Rand) string {
	if x.typed {
		return shards[int(key[len(key)-1])%len(shards)]
	}
	return shards[r.IntN(len(shards))]
}

// body returns an object. Its resourceVersion is the precondition of an update; 0: none.
func (x *resource) body(key, value, shard string, resourceVersion int64) string {
	metadata := map[string]any{
		"name":        key,
		"labels":      map[string]string{"shard": shard},
		"annotations": map[string]string{"value": value},
	}
	if resourceVersion > 0 {
		metadata["resourceVersion"] = strconv.FormatInt(resourceVersion, 10)
	}
	o := map[string]any{"apiVersion": "v1", "kind": x.kind, "metadata": metadata}
	if x.typed {
		o["type"] = shard
	}
	data, _ := json.Marshal(o)
	return string(data)
}

// watchPath returns the path of a watch of a single object, without a selector.
func (x *resource) watchPath(key string) string {
	return strings.Replace(x.path, "/api/v1/", "/api/v1/watch/", 1) + "/" + key
}

// selector returns the parameter and the value of a query for the objects of a shard.
func (x *resource) selector(shard string, r *rand.Rand) (parameter, value string) {
	if x.typed && r.IntN(2) == 0 {
		return "fieldSelector", "type=" + shard
	}
	return "labelSelector", "shard=" + shard
}

type object struct {
	Metadata struct {
		Name, Namespace, ResourceVersion string
		Labels                           map[string]string
		Annotations                      map[string]string
		Continue                         string
	}
}

func (o *object) revision() int64 {
	rv, _ := strconv.ParseInt(o.Metadata.ResourceVersion, 10, 64)
	return rv
}

func (o *object) item() history.Item {
	m := &o.Metadata
	return history.Item{Key: m.Name, Revision: o.revision(), Value: m.Annotations["value"], Shard: m.Labels["shard"]}
}

// isOurs returns true for an object of the history.
func (o *object) isOurs() bool {
	return strings.HasPrefix(o.Metadata.Name, ours) &&
		(o.Metadata.Namespace == namespace || o.Metadata.Namespace == "")
}

// revisions are the revisions that clients of a resource have received, in ascending order.
type revisions struct {
	mu  sync.Mutex
	all []int64
}

// add adds a revision if it is the newest.
func (k *revisions) add(revision int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if n := len(k.all); n == 0 || k.all[n-1] < revision {
		k.all = append(k.all, revision)
	}
}

// newest returns the newest revision; 0: there is none.
func (k *revisions) newest() int64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.all) == 0 {
		return 0
	}
	return k.all[len(k.all)-1]
}

// draw returns the newest revision, any revision, or mostly a revision of the last hundred. The rings of the watch tier
// begin within these. 0: there is none.
func (k *revisions) draw(r *rand.Rand) int64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	n := len(k.all)
	if n == 0 {
		return 0
	}
	switch r.IntN(4) {
	case 0:
		return k.all[n-1]
	case 1:
		return k.all[r.IntN(n)]
	default:
		return k.all[n-1-r.IntN(min(n, 100))]
	}
}

// final returns the key and the value of the last write of a shard, which ends its watches.
func final(shard string) string { return fmt.Sprintf("%sfinal-%s", ours, shard) }
