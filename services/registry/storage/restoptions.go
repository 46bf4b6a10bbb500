package storage

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/features"
	genericregistry "k8s.io/apiserver/pkg/registry/generic"
	apistorage "k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/etcd3"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/tools/cache"
)

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

type optionsGetter struct {
	s           *Storage
	config      func(schema.GroupResource, runtime.Object) (*storagebackend.ConfigForResource, error)
	groupPrefix bool
	// unregistered: the store is not registered in byPrefix and byName.
	unregistered bool
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
