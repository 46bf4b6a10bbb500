// Package storage stores objects in etcd with kube-apiserver's keys and encoding, over one shared client. For every
// stored resource it converts an etcd value into the encodings that the event log and the watch tier carry.
//
// It does not watch etcd: package publisher holds the only watch. Callers own the goroutines; storage starts only the
// reload of the encryption file, and the checks of etcd's members.
package storage

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	etcdkubernetes "go.etcd.io/etcd/client/v3/kubernetes"
	serveroptions "k8s.io/apiserver/pkg/server/options"
	serverstorage "k8s.io/apiserver/pkg/server/storage"
	"k8s.io/apiserver/pkg/storage/etcd3/metrics"
	"k8s.io/kubernetes/pkg/kubeapiserver"

	"watershed.dev/platform/egress"
	"watershed.dev/platform/lru"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// Storage is the connections to etcd and the set of stored resources.
type Storage struct {
	// Etcd is the main etcd (--etcd-servers).
	*Etcd
	Factory *serverstorage.DefaultStorageFactory
	Options *serveroptions.EtcdOptions
	options Options
	// etcds holds all etcds, the main etcd first.
	etcds   []*Etcd
	members *members

	encryption *encryption
	writeCache *writeCache
	responses  *lru.Cache[objectKey, cachedResponse]

	mu             sync.RWMutex
	byPrefix       map[string]*Resource
	byName         map[string]*Resource
	maxPrefixDepth int
}

// Open connects to etcd through out. resources selects the served resources and so the storage versions. id identifies
// the process in metrics. ctx bounds the connections to KMS plugins.
func Open(ctx context.Context, o Options, out egress.Selector, resources *serverstorage.ResourceConfig,
	id string) (*Storage, error) {
	if len(o.Servers) == 0 {
		return nil, fmt.Errorf("--etcd-servers must be specified")
	}
	tlsConfig, err := o.tlsConfig()
	if err != nil {
		return nil, err
	}
	encryption, err := openEncryption(ctx, &o, id)
	if err != nil {
		return nil, err
	}
	members := newMembers()
	connect := func(servers []string) (*etcdkubernetes.Client, error) {
		return members.connect(servers, tlsConfig, selectorOf(servers, out).Etcd())
	}
	client, err := connect(o.Servers)
	if err != nil {
		members.close()
		encryption.close()
		return nil, fmt.Errorf("--etcd-servers %v: %w", o.Servers, err)
	}
	s := &Storage{
		Options:  o.upstream(selectorOf(o.Servers, out)),
		options:  o,
		byPrefix: map[string]*Resource{},
		byName:   map[string]*Resource{},
		members:  members,

		encryption: encryption,
		writeCache: newWriteCache(),
		responses:  lru.New[objectKey, cachedResponse](responseCacheBytes),
	}
	s.Etcd = s.addEtcd(client, o.Servers)
	if err := s.openEtcds(connect); err != nil {
		s.Close()
		return nil, err
	}
	if isCluster(o.Servers) && !slices.ContainsFunc(s.etcds, func(e *Etcd) bool {
		return slices.ContainsFunc(e.Servers, isDialledByGRPC) // the lookup is for all etcds
	}) {
		s.Options.StorageConfig.Transport.EgressLookup = members.lookup(out.Etcd())
	}
	fc := kubeapiserver.NewStorageFactoryConfig()
	fc.APIResourceConfig = resources
	if s.Factory, err = fc.Complete(s.Options).New(); err != nil {
		s.Close()
		return nil, err
	}
	metrics.SetStorageMonitorGetter(func() (monitors []metrics.Monitor, _ error) {
		for _, e := range s.etcds {
			monitors = append(monitors, sizeMonitor{e.Client.Client})
		}
		return monitors, nil
	})
	return s, nil
}

// Close closes the connections to etcd and the connections to KMS plugins.
func (s *Storage) Close() (err error) {
	s.encryption.close()
	s.members.close()
	for _, e := range s.etcds {
		err = errors.Join(err, e.Client.Close())
	}
	return err
}

// Invalidate removes the object of an event from the write cache and the response cache, if they hold an older
// revision. The caller calls it with every event of the log.
func (s *Storage) Invalidate(e *logv1.Event) {
	st, ok := s.ByName(e.StorageResource)
	if !ok { // a custom resource: a stale entry is found by etcd's transaction
		return
	}
	s.writeCache.remove(st.Key(e.Namespace, e.Name), e.Revision)
	s.ResponseCache(st).invalidate(e)
}

// ClearCaches empties both caches. The caller calls it if etcd is in another epoch, because a revision may then belong
// to another value.
func (s *Storage) ClearCaches() {
	s.writeCache.byKey.Clear()
	s.responses.Clear()
}

// SweepCaches drops the objects that were not used for the duration idle from the write cache and the response cache.
func (s *Storage) SweepCaches(idle time.Duration) {
	s.writeCache.byKey.EvictIdle(idle)
	s.responses.EvictIdle(idle)
}

// ByName returns a stored built-in resource, such as "pods" or "deployments.apps".
func (s *Storage) ByName(name string) (*Resource, bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	st, ok := s.byName[name]
	return st, ok
}

// ByKey returns the built-in resource of an etcd key. It is false for keys of no API object, such as allocator ranges
// and apiserver leases, and for custom resources.
func (s *Storage) ByKey(key string) (*Resource, bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	end := len(s.prefix)
	for depth := strings.Count(s.prefix, "/"); depth < s.maxPrefixDepth; depth++ {
		i := strings.IndexByte(key[min(end, len(key)):], '/')
		if i < 0 {
			return nil, false
		}
		end += i + 1
		if st, ok := s.byPrefix[key[:end]]; ok {
			return st, true
		}
	}
	return nil, false
}
