// Package storage keeps objects in etcd in kube-apiserver's own layout and encoding, over one shared client, and knows
// for every stored resource how to turn an etcd value into what the event log and the watch tier carry.
package storage

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/pflag"
	"go.etcd.io/etcd/client/pkg/v3/transport"
	clientv3 "go.etcd.io/etcd/client/v3"
	etcdkubernetes "go.etcd.io/etcd/client/v3/kubernetes"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	genericregistry "k8s.io/apiserver/pkg/registry/generic"
	serveroptions "k8s.io/apiserver/pkg/server/options"
	serverstorage "k8s.io/apiserver/pkg/server/storage"
	apistorage "k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/etcd3"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"
	"k8s.io/client-go/tools/cache"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/kubeapiserver"

	"watershed.dev/platform/guard"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// Options say where etcd is. The names are kube-apiserver's.
type Options struct {
	Servers                   []string
	CertFile, KeyFile, CAFile string
	Prefix                    string
	CompactionInterval        time.Duration
	DefaultStorageMediaType   string
}

// AddFlags registers the flags --etcd-* and --storage-media-type, with their defaults.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	fs.StringSliceVar(&o.Servers, "etcd-servers", o.Servers,
		"etcd's client URLs (scheme://ip:port, or unix://path), comma separated.")
	fs.StringVar(&o.CertFile, "etcd-certfile", o.CertFile, "SSL certification file used to secure etcd communication.")
	fs.StringVar(&o.KeyFile, "etcd-keyfile", o.KeyFile, "SSL key file used to secure etcd communication.")
	fs.StringVar(&o.CAFile, "etcd-cafile", o.CAFile,
		"SSL Certificate Authority file used to secure etcd communication.")
	fs.StringVar(&o.Prefix, "etcd-prefix", "/registry", "The prefix to prepend to all resource paths in etcd.")
	fs.DurationVar(&o.CompactionInterval, "etcd-compaction-interval", 5*time.Minute,
		"The interval of compaction requests. If 0, the compaction request from the registry is disabled.")
	fs.StringVar(&o.DefaultStorageMediaType, "storage-media-type", runtime.ContentTypeProtobuf,
		"The media type to use to store objects in storage.")
}

// Storage is the one connection to etcd and everything that is stored through it.
type Storage struct {
	Client  *etcdkubernetes.Client
	Factory *serverstorage.DefaultStorageFactory
	Options *serveroptions.EtcdOptions
	prefix  string

	mu       sync.RWMutex
	byPrefix map[string]*Stored
	byName   map[string]*Stored
	deepest  int
}

// Open connects. resources says which resources are served, which decides the versions that are stored.
func Open(o Options, resources *serverstorage.ResourceConfig) (*Storage, error) {
	if len(o.Servers) == 0 {
		return nil, fmt.Errorf("--etcd-servers must be specified")
	}
	var tlsConfig *tls.Config
	if o.CertFile != "" || o.CAFile != "" {
		var err error
		info := transport.TLSInfo{CertFile: o.CertFile, KeyFile: o.KeyFile, TrustedCAFile: o.CAFile}
		if tlsConfig, err = info.ClientConfig(); err != nil {
			return nil, fmt.Errorf("--etcd-certfile %q, --etcd-keyfile %q, --etcd-cafile %q: %w",
				o.CertFile, o.KeyFile, o.CAFile, err)
		}
	}
	client, err := etcdkubernetes.New(clientv3.Config{
		Endpoints:            o.Servers,
		TLS:                  tlsConfig,
		Logger:               zap.NewNop(),
		DialTimeout:          20 * time.Second,
		DialKeepAliveTime:    10 * time.Second,
		DialKeepAliveTimeout: 5 * time.Second,
		MaxCallRecvMsgSize:   256 << 20,
		DialOptions: []grpc.DialOption{grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: 3 * time.Second,
			Backoff: backoff.Config{
				BaseDelay:  50 * time.Millisecond,
				Multiplier: 1.6,
				Jitter:     0.2,
				MaxDelay:   time.Second,
			}})},
	})
	if err != nil {
		return nil, fmt.Errorf("--etcd-servers %v: %w", o.Servers, err)
	}
	eo := serveroptions.NewEtcdOptions(storagebackend.NewDefaultConfig(o.Prefix, nil))
	to := &eo.StorageConfig.Transport
	to.ServerList, to.CertFile, to.KeyFile, to.TrustedCAFile = o.Servers, o.CertFile, o.KeyFile, o.CAFile
	eo.StorageConfig.CompactionInterval = 0 // the publisher compacts: upstream's compactor holds a watch of its own
	eo.StorageConfig.CountMetricPollPeriod = 0
	eo.DefaultStorageMediaType = o.DefaultStorageMediaType
	eo.EnableWatchCache = false
	fc := kubeapiserver.NewStorageFactoryConfig()
	fc.APIResourceConfig = resources
	f, err := fc.Complete(eo).New()
	if err != nil {
		client.Close()
		return nil, err
	}
	return &Storage{
		Client:   client,
		Factory:  f,
		Options:  eo,
		prefix:   path.Join("/", o.Prefix) + "/",
		byPrefix: map[string]*Stored{},
		byName:   map[string]*Stored{},
	}, nil
}

// Close ends the connection.
func (s *Storage) Close() error { return s.Client.Close() }

// Prefix is what all keys begin with, "/registry/".
func (s *Storage) Prefix() string { return s.prefix }

// RESTOptions is the options getter of the built-in resources.
func (s *Storage) RESTOptions() genericregistry.RESTOptionsGetter {
	return &optionsGetter{s: s, config: s.Factory.NewConfig}
}

// RESTOptionsFor is the options getter of resources with a codec of their own: CRDs, APIServices and custom resources.
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
	// unlisted: the decorator does not remember the resource.
	unlisted bool
}

// CustomRESTOptions is the options getter of one version of a custom resource. What Custom makes stands for all
// versions.
func (s *Storage) CustomRESTOptions(codec runtime.Codec) genericregistry.RESTOptionsGetter {
	return &optionsGetter{
		s: s,
		config: func(gr schema.GroupResource, _ runtime.Object) (*storagebackend.ConfigForResource, error) {
			c := s.Options.StorageConfig
			c.Codec = codec
			return c.ForResource(gr), nil
		},
		groupPrefix: true,
		unlisted:    true,
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
	decorate := g.s.decorate
	if g.unlisted {
		decorate = g.s.open
	}
	return genericregistry.RESTOptions{
		StorageConfig:           config,
		Decorator:               decorate,
		EnableGarbageCollection: true,
		DeleteCollectionWorkers: 1,
		ResourcePrefix:          prefix,
	}, nil
}

// open opens the storage of one resource over the shared client.
func (s *Storage) open(config *storagebackend.ConfigForResource, resourcePrefix string,
	_ func(runtime.Object) (string, error),
	newFunc, newListFunc func() runtime.Object, _ apistorage.AttrFunc, _ apistorage.IndexerFuncs,
	_ *cache.Indexers) (apistorage.Interface, factory.DestroyFunc, error) {
	versioner := apistorage.APIObjectVersioner{}
	store, err := etcd3.New(s.Client, nil, config.Codec, newFunc, newListFunc, config.Prefix, resourcePrefix,
		config.GroupResource,
		transformerOf(config), config.LeaseManagerConfig, etcd3.NewDefaultDecoder(config.Codec, versioner), versioner)
	if err != nil {
		return nil, nil, err
	}
	return store, func() { store.Close() }, nil
}

func transformerOf(config *storagebackend.ConfigForResource) value.Transformer {
	if config.Transformer != nil {
		return config.Transformer
	}
	return identity.NewEncryptCheckTransformer()
}

// decorate is open, and remembers how to read the resource's values.
func (s *Storage) decorate(config *storagebackend.ConfigForResource, resourcePrefix string,
	keyFunc func(runtime.Object) (string, error),
	newFunc, newListFunc func() runtime.Object, attrs apistorage.AttrFunc, triggers apistorage.IndexerFuncs,
	indexers *cache.Indexers) (apistorage.Interface, factory.DestroyFunc, error) {
	store, destroy, err := s.open(config, resourcePrefix, keyFunc, newFunc, newListFunc, attrs, triggers, indexers)
	if err != nil {
		return nil, nil, err
	}
	st := &Stored{
		GroupResource: config.GroupResource,
		Prefix:        s.prefix + strings.Trim(resourcePrefix, "/") + "/",
		codec:         config.Codec,
		newFunc:       newFunc,
		attrs:         attrs,
		transformer:   transformerOf(config),
		versioner:     apistorage.APIObjectVersioner{},
	}
	if err := st.complete(config, newFunc()); err != nil {
		return nil, nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.byPrefix[st.Prefix]; !ok { // events are stored once and served by two groups
		s.byPrefix[st.Prefix], s.byName[st.Name()] = st, st
		s.deepest = max(s.deepest, strings.Count(st.Prefix, "/"))
	}
	return store, destroy, nil
}

// ByName finds a stored resource ("pods", "deployments.apps").
func (s *Storage) ByName(name string) (*Stored, bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	st, ok := s.byName[name]
	return st, ok
}

// ByKey finds whose etcd key it is. Keys of nothing served (ranges, leases of the control plane) are nobody's.
func (s *Storage) ByKey(key string) (*Stored, bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	end := len(s.prefix)
	for depth := strings.Count(s.prefix, "/"); depth < s.deepest; depth++ {
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

// Stored is one resource as etcd has it.
type Stored struct {
	GroupResource schema.GroupResource
	// Prefix is the key prefix, with the slash that ends it.
	Prefix string
	// Kind is the kind and version that the log carries, which is the one stored.
	Kind schema.GroupVersionKind

	codec       runtime.Decoder
	newFunc     func() runtime.Object
	attrs       apistorage.AttrFunc
	transformer value.Transformer
	versioner   apistorage.Versioner
	convertor   runtime.ObjectConvertor
	// decorator is what the resource's own storage does to every object that it has read, or nil.
	decorator func(runtime.Object)
	// always: what selectors ask of an object is not all that attrs tells.
	always bool
}

// Name is the resource's name across the system.
func (s *Stored) Name() string { return s.GroupResource.String() }

// Custom is the stored resource of a definition: whoever follows definitions keeps it. kind is in the version that is
// stored now; decode reads an object in the version that it is stored in, and attrs tells what selectors ask of it in
// that version. converted: they may ask more, of other versions.
func (s *Storage) Custom(gr schema.GroupResource, kind schema.GroupVersionKind,
	decode func([]byte) (*unstructured.Unstructured, error), attrs apistorage.AttrFunc, converted bool) *Stored {
	return &Stored{
		always:        converted,
		GroupResource: gr,
		Prefix:        s.prefix + gr.Group + "/" + gr.Resource + "/",
		Kind:          kind,
		codec:         decoder(decode),
		attrs:         attrs,
		newFunc:       func() runtime.Object { return &unstructured.Unstructured{} },
		transformer:   identity.NewEncryptCheckTransformer(),
		versioner:     apistorage.APIObjectVersioner{},
	}
}

type decoder func([]byte) (*unstructured.Unstructured, error)

// Decode implements runtime.Decoder.
func (d decoder) Decode(data []byte, _ *schema.GroupVersionKind, _ runtime.Object) (runtime.Object,
	*schema.GroupVersionKind, error) {
	u, err := d(data)
	if err != nil {
		return nil, nil, err
	}
	gvk := u.GroupVersionKind()
	return u, &gvk, nil
}

func (s *Stored) complete(config *storagebackend.ConfigForResource, example runtime.Object) error {
	scheme := SchemeFor(example)
	kinds, _, err := scheme.ObjectKinds(example)
	if err != nil {
		return err
	}
	gvk, ok := config.EncodeVersioner.KindForGroupVersionKinds(kinds)
	if !ok {
		return fmt.Errorf("no stored version for %s", s.GroupResource)
	}
	// The log carries the most preferred version of the group where that has the kind: clients mostly read that one.
	for _, gv := range scheme.PrioritizedVersionsForGroup(gvk.Group) {
		if scheme.Recognizes(gv.WithKind(gvk.Kind)) {
			gvk = gv.WithKind(gvk.Kind)
			break
		}
	}
	s.Kind, s.convertor = gvk, scheme
	return nil
}

var schemes = []*runtime.Scheme{legacyscheme.Scheme}

// AddScheme makes the types of another scheme storable.
func AddScheme(s *runtime.Scheme) { schemes = append(schemes, s) }

// SchemeFor is the scheme that knows obj's type.
func SchemeFor(obj runtime.Object) *runtime.Scheme {
	for _, s := range schemes {
		if _, _, err := s.ObjectKinds(obj); err == nil {
			return s
		}
	}
	return legacyscheme.Scheme
}

type authenticatedKey string

// AuthenticatedData implements value.Context: an encrypted value belongs to its key.
func (k authenticatedKey) AuthenticatedData() []byte { return []byte(k) }

// Decode reads an etcd value.
func (s *Stored) Decode(ctx context.Context, key string, data []byte, revision int64) (runtime.Object, error) {
	plain, _, err := s.transformer.TransformFromStorage(ctx, data, authenticatedKey(key))
	if err != nil {
		return nil, err
	}
	obj, _, err := s.codec.Decode(plain, nil, s.newFunc())
	if err != nil {
		return nil, err
	}
	if s.decorator != nil {
		s.decorator(obj)
	}
	return obj, s.versioner.UpdateObject(obj, uint64(revision))
}

// Decorate has f change every object that is read.
func (s *Stored) Decorate(f func(runtime.Object)) { s.decorator = f }

// Encode makes what the log carries of obj.
func (s *Stored) Encode(obj runtime.Object) (*logv1.Object, error) {
	l, f, err := s.attrs(obj)
	if err != nil {
		return nil, err
	}
	out := &logv1.Object{Labels: l, Fields: f}
	versioned := obj
	if s.convertor != nil {
		if versioned, err = s.convertor.ConvertToVersion(obj, s.Kind.GroupVersion()); err != nil {
			return nil, err
		}
		// lists hold items without it, frames put it back
		versioned.GetObjectKind().SetGroupVersionKind(schema.GroupVersionKind{})
	}
	if u, ok := versioned.(*unstructured.Unstructured); ok {
		return out, untyped(u, out)
	}
	if out.Json, err = json.Marshal(versioned); err != nil {
		return nil, err
	}
	if m, ok := versioned.(interface{ Marshal() ([]byte, error) }); ok {
		if out.Protobuf, err = m.Marshal(); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// untyped writes an object without a Go type as the log carries it: metadata first, where what cuts it out looks for
// it, and in protobuf once more, for those who watch nothing else.
func untyped(u *unstructured.Unstructured, out *logv1.Object) error {
	out.Version = u.GroupVersionKind().Version
	var err error
	if out.Json, err = Untyped(u); err != nil {
		return err
	}
	var partial metav1.PartialObjectMetadata
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(map[string]any{"metadata": u.Object["metadata"]},
		&partial); err != nil {
		return err
	}
	out.Protobuf, err = partial.Marshal()
	return err
}

// Untyped is an object's JSON without apiVersion and kind, metadata first.
func Untyped(u *unstructured.Unstructured) ([]byte, error) {
	m, err := json.Marshal(u.Object["metadata"])
	if err != nil {
		return nil, err
	}
	rest := maps.Clone(u.Object)
	delete(rest, "metadata")
	delete(rest, "apiVersion")
	delete(rest, "kind")
	body, err := json.Marshal(rest)
	if err != nil {
		return nil, err
	}
	data := append(append(make([]byte, 0, len(m)+len(body)+16), `{"metadata":`...), m...)
	if len(rest) > 0 {
		data = append(data, ',')
	}
	return append(data, body[1:]...), nil
}

// Row decodes an etcd value and encodes it for the watch tier. What cannot be read is a row that says why.
func (s *Stored) Row(ctx context.Context, key string, data []byte, revision int64) *registryv1.Row {
	row := &registryv1.Row{Revision: revision}
	obj, o, err := s.Read(ctx, key, data, revision)
	if err != nil {
		row.Namespace, row.Name = s.placeOf(key)
		row.Unreadable = err.Error()
		return row
	}
	row.Namespace, row.Name = obj.GetNamespace(), obj.GetName()
	row.Labels, row.Fields, row.Json, row.Protobuf, row.Version = o.Labels, o.Fields, o.Json, o.Protobuf, o.Version
	return row
}

// Read decodes an etcd value and encodes it. A panic of a type's own code, which a value of an unknown making may
// reach, is an error like any other.
func (s *Stored) Read(ctx context.Context, key string, data []byte,
	revision int64) (m metav1.Object, o *logv1.Object, err error) {
	defer guard.Error("reading an object", &err)
	obj, err := s.Decode(ctx, key, data, revision)
	if err != nil {
		return nil, nil, err
	}
	if o, err = s.Encode(obj); err != nil {
		return nil, nil, err
	}
	m, err = meta.Accessor(obj)
	return m, o, err
}

// placeOf is the namespace and name that an etcd key stands for, where the object itself cannot say.
func (s *Stored) placeOf(key string) (namespace, name string) {
	rest := strings.TrimPrefix(key, s.Prefix)
	if i := strings.LastIndexByte(rest, '/'); i >= 0 {
		return rest[:i], rest[i+1:]
	}
	return "", rest
}

// SelectableFields are the stored fields that the resource's objects have.
func (s *Stored) SelectableFields() []string {
	_, f, err := s.attrs(s.newFunc())
	if err != nil {
		return nil
	}
	var names []string
	for name := range f {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// DecodeVersioned reads what the log carries back into the hub version.
func (s *Stored) DecodeVersioned(o *logv1.Object,
	into func(schema.GroupVersionKind) (runtime.Object, error)) (runtime.Object, error) {
	obj, err := into(s.Kind)
	if err != nil {
		return nil, err
	}
	if u, ok := obj.(interface{ Unmarshal([]byte) error }); ok && len(o.Protobuf) > 0 {
		return obj, u.Unmarshal(o.Protobuf)
	}
	return obj, json.Unmarshal(o.Json, obj)
}

// Changed says whether a selector could tell old from the newer object.
func (s *Stored) Changed(old runtime.Object, newer *logv1.Object) (bool, error) {
	if s.always {
		return true, nil
	}
	l, f, err := s.attrs(old)
	return err == nil && (!maps.Equal(l, newer.Labels) || !maps.Equal(f, newer.Fields)), err
}

// Revision is an object's resource version as a number.
func Revision(obj metav1.Object) (uint64, error) {
	return apistorage.APIObjectVersioner{}.ParseResourceVersion(obj.GetResourceVersion())
}
