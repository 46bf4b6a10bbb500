// Package storage stores objects in etcd with kube-apiserver's keys and encoding, over one shared client. For every
// stored resource it converts an etcd value into the encodings that the event log and the watch tier carry.
//
// It does not watch etcd: package publisher holds the only watch. Callers own the goroutines; storage starts only the
// reload of the encryption file.
package storage

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/spf13/pflag"
	etcdkubernetes "go.etcd.io/etcd/client/v3/kubernetes"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/features"
	genericregistry "k8s.io/apiserver/pkg/registry/generic"
	serveroptions "k8s.io/apiserver/pkg/server/options"
	serverstorage "k8s.io/apiserver/pkg/server/storage"
	apistorage "k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/etcd3"
	"k8s.io/apiserver/pkg/storage/etcd3/metrics"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/tools/cache"
	"k8s.io/kubernetes/pkg/kubeapiserver"

	"watershed.dev/platform/egress"
	"watershed.dev/platform/lru"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// Options hold the flags of etcd and of encryption at rest, with kube-apiserver's names.
type Options struct {
	Servers []string
	// Overrides name the etcd servers of some resources (group/resource#server;server).
	Overrides                 []string
	CertFile, KeyFile, CAFile string
	Prefix                    string
	CompactionInterval        time.Duration
	DefaultStorageMediaType   string
	// EncryptionProviderConfig is the path of an EncryptionConfiguration (apiserver.config.k8s.io/v1). Empty: no
	// encryption.
	EncryptionProviderConfig  string
	EncryptionAutomaticReload bool
	DeleteCollectionWorkers   int
	GarbageCollection         bool
	LeaseReuseSeconds         int64
	CountPollPeriod           time.Duration
	DBSizePollInterval        time.Duration
}

// AddFlags registers the flags --etcd-*, --storage-media-type and --encryption-provider-config* with their defaults.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	fs.StringSliceVar(&o.Servers, "etcd-servers", o.Servers,
		"etcd's client URLs (scheme://ip:port, or unix://path), comma separated.")
	fs.StringSliceVar(&o.Overrides, "etcd-servers-overrides", o.Overrides,
		"Per-resource etcd servers overrides, comma separated. The format of an override is group/resource#servers; "+
			"the servers are URLs, semicolon separated. It applies to built-in resources only.")
	fs.StringVar(&o.CertFile, "etcd-certfile", o.CertFile, "SSL certification file used to secure etcd communication.")
	fs.StringVar(&o.KeyFile, "etcd-keyfile", o.KeyFile, "SSL key file used to secure etcd communication.")
	fs.StringVar(&o.CAFile, "etcd-cafile", o.CAFile,
		"SSL Certificate Authority file used to secure etcd communication.")
	fs.StringVar(&o.Prefix, "etcd-prefix", "/registry", "The prefix to prepend to all resource paths in etcd.")
	fs.DurationVar(&o.CompactionInterval, "etcd-compaction-interval", 5*time.Minute,
		"The interval of compaction requests. If 0, the compaction request from the registry is disabled.")
	fs.StringVar(&o.DefaultStorageMediaType, "storage-media-type", runtime.ContentTypeProtobuf,
		"The media type to use to store objects in storage.")
	fs.StringVar(&o.EncryptionProviderConfig, "encryption-provider-config", "",
		"The file containing configuration for encryption providers to be used for storing secrets in etcd.")
	fs.BoolVar(&o.EncryptionAutomaticReload, "encryption-provider-config-automatic-reload", false,
		"Determines if the file set by --encryption-provider-config should be automatically reloaded if the disk "+
			"contents change.")
	fs.IntVar(&o.DeleteCollectionWorkers, "delete-collection-workers", 1,
		"Number of workers spawned for a DeleteCollection call.")
	fs.BoolVar(&o.GarbageCollection, "enable-garbage-collector", true,
		"Enables the generic garbage collector. It must have the value of the corresponding flag of "+
			"kube-controller-manager.")
	fs.Int64Var(&o.LeaseReuseSeconds, "lease-reuse-duration-seconds",
		etcd3.NewDefaultLeaseManagerConfig().ReuseDurationSeconds,
		"The time in seconds that each etcd lease is reused.")
	fs.DurationVar(&o.CountPollPeriod, "etcd-count-metric-poll-period", time.Minute,
		"Frequency of polling etcd for the number of objects of each resource. 0 disables the metric.")
	fs.DurationVar(&o.DBSizePollInterval, "etcd-db-metric-poll-interval", storagebackend.DefaultDBMetricPollInterval,
		"The interval of requests to poll etcd for its size.")
}

// Storage is the connections to etcd and the set of stored resources.
type Storage struct {
	// Etcd is the main etcd (--etcd-servers).
	*Etcd
	Factory *serverstorage.DefaultStorageFactory
	Options *serveroptions.EtcdOptions
	options Options
	// etcds holds all etcds, the main etcd first.
	etcds []*Etcd

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
	connect := func(servers []string) (*etcdkubernetes.Client, error) {
		return newClient(servers, tlsConfig, selectorOf(servers, out).Etcd())
	}
	client, err := connect(o.Servers)
	if err != nil {
		encryption.close()
		return nil, fmt.Errorf("--etcd-servers %v: %w", o.Servers, err)
	}
	s := &Storage{
		Options:  o.upstream(selectorOf(o.Servers, out)),
		options:  o,
		byPrefix: map[string]*Resource{},
		byName:   map[string]*Resource{},

		encryption: encryption,
		writeCache: newWriteCache(),
		responses:  lru.New[objectKey, cachedResponse](responseCacheBytes),
	}
	s.Etcd = s.addEtcd(client, o.Servers)
	if err := s.openEtcds(connect); err != nil {
		s.Close()
		return nil, err
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

// RESTOptions returns the RESTOptionsGetter of the built-in resources.
func (s *Storage) RESTOptions() genericregistry.RESTOptionsGetter {
	return &optionsGetter{s: s, config: s.Factory.NewConfig}
}

// RESTOptionsFor returns the RESTOptionsGetter of resources with their own codec: CRDs and APIServices.
func (s *Storage) RESTOptionsFor(codec runtime.Codec,
	versioner runtime.GroupVersioner) genericregistry.RESTOptionsGetter {
	return &optionsGetter{
		s: s,
		config: func(gr schema.GroupResource, _ runtime.Object) (*storagebackend.ConfigForResource, error) {
			c := s.Options.StorageConfig
			c.Codec, c.EncodeVersioner = codec, versioner
			return c.ForResource(gr), nil
		},
		groupPrefix: true,
	}
}

type optionsGetter struct {
	s           *Storage
	config      func(schema.GroupResource, runtime.Object) (*storagebackend.ConfigForResource, error)
	groupPrefix bool
	// unregistered: the store is not registered in byPrefix and byName.
	unregistered bool
}

// CustomRESTOptions returns the RESTOptionsGetter of a custom resource in one version. The Resource of CustomResource
// stands for all versions.
func (s *Storage) CustomRESTOptions(codec runtime.Codec) genericregistry.RESTOptionsGetter {
	return &optionsGetter{
		s: s,
		config: func(gr schema.GroupResource, _ runtime.Object) (*storagebackend.ConfigForResource, error) {
			c := s.Options.StorageConfig
			c.Codec = codec
			return c.ForResource(gr), nil
		},
		groupPrefix:  true,
		unregistered: true,
	}
}

// GetRESTOptions implements generic.RESTOptionsGetter.
func (g *optionsGetter) GetRESTOptions(gr schema.GroupResource,
	example runtime.Object) (genericregistry.RESTOptions, error) {
	config, err := g.config(gr, example)
	if err != nil {
		return genericregistry.RESTOptions{}, fmt.Errorf("unable to find storage destination for %v, due to %v",
			gr, err)
	}
	prefix := g.s.Factory.ResourcePrefix(gr)
	if g.groupPrefix {
		prefix = gr.Group + "/" + gr.Resource
	}
	decorate, poll := g.s.decorate, g.s.options.CountPollPeriod
	if g.unregistered { // a version of a CRD, whose store is never destroyed: a poll would outlive it
		decorate, poll = g.s.newStore, 0
	}
	return genericregistry.RESTOptions{
		StorageConfig:           config,
		Decorator:               decorate,
		EnableGarbageCollection: g.s.options.GarbageCollection,
		DeleteCollectionWorkers: g.s.options.DeleteCollectionWorkers,
		CountMetricPollPeriod:   poll,
		ResourcePrefix:          prefix,
	}, nil
}

// newStore opens the store of a resource over the shared client.
func (s *Storage) newStore(config *storagebackend.ConfigForResource, resourcePrefix string,
	_ func(runtime.Object) (string, error),
	newFunc, newListFunc func() runtime.Object, _ apistorage.AttrFunc, _ apistorage.IndexerFuncs,
	_ *cache.Indexers) (apistorage.Interface, factory.DestroyFunc, error) {
	versioner := apistorage.APIObjectVersioner{}
	etcd := s.etcdOf(config.Transport.ServerList)
	if etcd == nil {
		return nil, nil, fmt.Errorf("%s has no client of etcd %v", config.GroupResource, config.Transport.ServerList)
	}
	decoder := etcd3.NewDefaultDecoder(config.Codec, versioner)
	transformer := s.encryption.transformerFor(config.GroupResource)
	unsafeDeletion := utilfeature.DefaultFeatureGate.Enabled(features.AllowUnsafeMalformedObjectDeletion)
	if unsafeDeletion { // as in k8s.io/apiserver/pkg/storage/storagebackend/factory
		decoder = etcd3.WithCorruptObjErrorHandlingDecoder(decoder)
		transformer = etcd3.WithCorruptObjErrorHandlingTransformer(transformer)
	}
	store, err := etcd3.New(etcd.Client, nil, config.Codec, newFunc, newListFunc, config.Prefix, resourcePrefix,
		config.GroupResource, transformer, config.LeaseManagerConfig, decoder, versioner)
	if err != nil {
		return nil, nil, err
	}
	var backend apistorage.Interface = store
	if unsafeDeletion {
		backend = etcd3.NewStoreWithUnsafeCorruptObjectDeletion(store, config.GroupResource)
	}
	return &cachedStore{
		Interface:   backend,
		writeCache:  s.writeCache,
		prefix:      s.prefix,
		newFunc:     newFunc,
		decoder:     decoder,
		transformer: transformer,
	}, func() { store.Close() }, nil
}

// decorate opens a store as newStore does, and registers its Resource, which decodes the resource's values.
func (s *Storage) decorate(config *storagebackend.ConfigForResource, resourcePrefix string,
	keyFunc func(runtime.Object) (string, error),
	newFunc, newListFunc func() runtime.Object, attrs apistorage.AttrFunc, triggers apistorage.IndexerFuncs,
	indexers *cache.Indexers) (apistorage.Interface, factory.DestroyFunc, error) {
	store, destroy, err := s.newStore(config, resourcePrefix, keyFunc, newFunc, newListFunc, attrs, triggers, indexers)
	if err != nil {
		return nil, nil, err
	}
	st := &Resource{
		Etcd:          s.etcdOf(config.Transport.ServerList),
		GroupResource: config.GroupResource,
		Prefix:        s.prefix + strings.Trim(resourcePrefix, "/") + "/",
		codec:         config.Codec,
		newFunc:       newFunc,
		attrs:         attrs,
		transformer:   s.encryption.transformerFor(config.GroupResource),
		versioner:     apistorage.APIObjectVersioner{},
	}
	if err := st.complete(config, newFunc()); err != nil {
		return nil, nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.byPrefix[st.Prefix]; !ok { // two groups serve events, which are stored once
		s.byPrefix[st.Prefix], s.byName[st.Name()] = st, st
		s.maxPrefixDepth = max(s.maxPrefixDepth, strings.Count(st.Prefix, "/"))
	}
	return store, destroy, nil
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
