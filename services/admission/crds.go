package admission

import (
	"context"
	"sync"
	"time"

	"k8s.io/apiextensions-apiserver/pkg/apihelpers"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	extensionsclient "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset"
	extensions "k8s.io/apiextensions-apiserver/pkg/client/informers/externalversions"
	listers "k8s.io/apiextensions-apiserver/pkg/client/listers/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/admission"
	webhookutil "k8s.io/apiserver/pkg/util/webhook"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"watershed.dev/platform/apiclient"
	"watershed.dev/platform/crd"
	"watershed.dev/platform/egress"
)

// crds defaults and converts custom resources, because a webhook may need a version other than the one written.
type crds struct {
	client     extensionsclient.Interface
	informers  extensions.SharedInformerFactory
	lister     listers.CustomResourceDefinitionLister
	converters *crd.Converters

	mu     sync.Mutex
	cached map[string]*customResource
}

type customResource struct {
	*crd.CRD
	converter   *crd.Converter
	equivalents runtime.EquivalentResourceMapper
}

// newCRDs watches CRDs with config, and calls conversion webhooks through out, or with ownService. It calls changed
// after each change of a CRD. While the event log of cluster stalls, its informer follows etcd with lists.
func newCRDs(cluster *apiclient.Cluster, config, ownService *rest.Config, services webhookutil.ServiceResolver,
	out egress.Selector, changed func()) (*crds, error) {
	client, err := extensionsclient.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	c := &crds{
		client: client,
		informers: extensions.NewSharedInformerFactoryWithOptions(client, 10*time.Minute,
			extensions.WithTransform(crd.Transform)),
		cached: map[string]*customResource{},
	}
	lw := apiclient.NewListWatch(client.ApiextensionsV1().CustomResourceDefinitions(),
		&apiextensionsv1.CustomResourceDefinition{}, cluster)
	// the factory's own informer has another client
	newInformer := func(_ extensionsclient.Interface, resync time.Duration) cache.SharedIndexInformer {
		return cache.NewSharedIndexInformer(lw.Informer(), lw.Example, resync, cache.Indexers{})
	}
	c.informers.InformerFor(lw.Example, newInformer)
	crdInformer := c.informers.Apiextensions().V1().CustomResourceDefinitions()
	c.lister = crdInformer.Lister()
	_, err = crdInformer.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { changed() },
		UpdateFunc: func(any, any) { changed() },
		DeleteFunc: func(obj any) {
			changed()
			if tombstone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = tombstone.Obj
			}
			if d, ok := obj.(*apiextensionsv1.CustomResourceDefinition); ok {
				c.mu.Lock()
				defer c.mu.Unlock()
				delete(c.cached, d.Name)
			}
		},
	})
	if err != nil {
		return nil, err
	}
	c.converters = crd.NewConverters(services, crd.Webhooks(out, ownService))
	return c, nil
}

// get returns a CRD. If the informer does not have it, its names or the version, get reads it from the gateway.
func (c *crds) get(ctx context.Context, name, version string) (*customResource, error) {
	d, err := c.lister.Get(name)
	if apierrors.IsNotFound(err) ||
		err == nil && (crd.ValidateNames(d) != nil || !apihelpers.HasServedCRDVersion(d, version)) {
		d, err = c.client.ApiextensionsV1().CustomResourceDefinitions().Get(ctx, name, metav1.GetOptions{})
	}
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if k := c.cached[name]; k != nil && crd.Same(k.CustomResourceDefinition, d) {
		return k, nil
	}
	parsed, err := crd.New(d)
	if err != nil {
		return nil, err
	}
	k := &customResource{CRD: parsed, equivalents: parsed.Equivalents()}
	if k.converter, err = parsed.Converter(c.converters); err != nil {
		return nil, err
	}
	c.cached[name] = k
	return k, nil
}

// interfaces returns the chain's interfaces to the CRD's objects in a version.
func (c *crds) interfaces(ctx context.Context, name, version string) (admission.ObjectInterfaces, error) {
	k, err := c.get(ctx, name, version)
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	parameters := k.Parameters(version)
	safe, _ := k.converter.WithContext(ctx)
	return &interfaces{
		customResource: k,
		safe:           safe,
		typer:          crd.Typer(parameters),
		defaulter:      k.Defaulter(parameters),
	}, nil
}

// interfaces implements admission.ObjectInterfaces.
type interfaces struct {
	*customResource
	safe      runtime.ObjectConvertor
	typer     runtime.ObjectTyper
	defaulter runtime.ObjectDefaulter
}

func (i *interfaces) GetObjectCreater() runtime.ObjectCreater     { return crd.Creater{} }
func (i *interfaces) GetObjectTyper() runtime.ObjectTyper         { return i.typer }
func (i *interfaces) GetObjectDefaulter() runtime.ObjectDefaulter { return i.defaulter }
func (i *interfaces) GetObjectConvertor() runtime.ObjectConvertor { return i.safe }
func (i *interfaces) GetEquivalentResourceMapper() runtime.EquivalentResourceMapper {
	return i.equivalents
}
