package crd

import (
	"context"
	"net/http"
	"strconv"
	"sync"

	"k8s.io/apiextensions-apiserver/pkg/apiserver/conversion"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/util/webhook"
	"k8s.io/client-go/rest"
)

// Upstream calls conversion webhooks with context.TODO() (k8s.io/apiextensions-apiserver/pkg/apiserver/conversion,
// webhook_converter.go). A webhook that hangs then blocks a request for 30 s after its client has disconnected. A
// Converter calls webhooks in the context of the request. Upstream's converter passes no context to its HTTP client.
// Each running conversion therefore has its own client, whose RoundTripper adds the context.

// Converters makes the converters of CRDs.
type Converters struct {
	services webhook.ServiceResolver
	auth     webhook.AuthenticationInfoResolverWrapper
}

// NewConverters returns Converters that resolve the Services of webhooks with services. auth configures the clients.
func NewConverters(services webhook.ServiceResolver, auth webhook.AuthenticationInfoResolverWrapper) *Converters {
	return &Converters{services: services, auth: auth}
}

// Converter converts the objects of a CRD between versions.
type Converter struct {
	shared *Converters
	crd    *CRD
	// base converts objects if the CRD has no webhook. If it has a webhook, base converts only field labels.
	base *client

	mu sync.Mutex
	// transport is shared by all clients, so that they share connections.
	transport http.RoundTripper
	idle      []*client
}

// idleClients is the number of clients that a converter caches for later conversions.
const idleClients = 32

// client is upstream's converter. One conversion uses it at a time.
type client struct {
	converter    *Converter
	safe, unsafe runtime.ObjectConvertor
	// ctx is the context of the running conversion.
	ctx context.Context
}

// Converter returns the converter of the CRD.
func (d *CRD) Converter(shared *Converters) (*Converter, error) {
	c := &Converter{shared: shared, crd: d}
	var err error
	c.base, err = c.newClient()
	return c, err
}

func (c *Converter) newClient() (*client, error) {
	cl := &client{converter: c}
	factory, err := conversion.NewCRConverterFactory(c.shared.services,
		func(r webhook.AuthenticationInfoResolver) webhook.AuthenticationInfoResolver {
			if c.shared.auth != nil {
				r = c.shared.auth(r)
			}
			return &boundResolver{r, cl}
		})
	if err == nil {
		cl.safe, cl.unsafe, err = factory.NewConverter(c.crd.CustomResourceDefinition)
	}
	return cl, err
}

// WithContext returns two converters whose webhook calls end with ctx. safe copies its input; unsafe changes it.
func (c *Converter) WithContext(ctx context.Context) (safe, unsafe runtime.ObjectConvertor) {
	if !c.crd.UsesWebhook() {
		return c.base.safe, c.base.unsafe
	}
	safe = &contextConverter{c, ctx, func(cl *client) runtime.ObjectConvertor { return cl.safe }}
	unsafe = &contextConverter{c, ctx, func(cl *client) runtime.ObjectConvertor { return cl.unsafe }}
	return safe, unsafe
}

// with runs a conversion with a client that no other conversion uses at the same time.
func (c *Converter) with(ctx context.Context, convert func(*client) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	c.mu.Lock()
	var cl *client
	if n := len(c.idle); n > 0 {
		cl, c.idle = c.idle[n-1], c.idle[:n-1]
	}
	c.mu.Unlock()
	if cl == nil {
		var err error
		if cl, err = c.newClient(); err != nil {
			return err
		}
	}
	cl.ctx = ctx
	defer func() {
		cl.ctx = nil
		c.mu.Lock()
		defer c.mu.Unlock()
		if len(c.idle) < idleClients {
			c.idle = append(c.idle, cl)
		}
	}()
	return convert(cl)
}

// contextConverter implements runtime.ObjectConvertor in a context.
type contextConverter struct {
	converter *Converter
	ctx       context.Context
	choose    func(*client) runtime.ObjectConvertor
}

// Convert implements runtime.ObjectConvertor.
func (w *contextConverter) Convert(in, out, context any) error {
	return w.converter.with(w.ctx, func(c *client) error { return w.choose(c).Convert(in, out, context) })
}

// ConvertToVersion implements runtime.ObjectConvertor.
func (w *contextConverter) ConvertToVersion(
	in runtime.Object,
	gv runtime.GroupVersioner,
) (out runtime.Object, err error) {
	err = w.converter.with(w.ctx, func(c *client) error {
		out, err = w.choose(c).ConvertToVersion(in, gv)
		return err
	})
	return out, err
}

// ConvertFieldLabel implements runtime.ObjectConvertor.
func (w *contextConverter) ConvertFieldLabel(gvk schema.GroupVersionKind, label, value string) (string, string, error) {
	return w.converter.base.safe.ConvertFieldLabel(gvk, label, value)
}

// boundResolver routes the requests of a webhook through its client's RoundTrip.
type boundResolver struct {
	webhook.AuthenticationInfoResolver
	client *client
}

// ClientConfigFor implements webhook.AuthenticationInfoResolver.
func (b *boundResolver) ClientConfigFor(hostPort string) (*rest.Config, error) {
	return b.bind(b.AuthenticationInfoResolver.ClientConfigFor(hostPort))
}

// ClientConfigForService implements webhook.AuthenticationInfoResolver.
func (b *boundResolver) ClientConfigForService(name, namespace string, port int) (*rest.Config, error) {
	return b.bind(b.AuthenticationInfoResolver.ClientConfigForService(name, namespace, port))
}

func (b *boundResolver) bind(config *rest.Config, err error) (*rest.Config, error) {
	if err != nil {
		return nil, err
	}
	config = rest.CopyConfig(config)
	config.Wrap(func(rt http.RoundTripper) http.RoundTripper {
		c := b.client.converter
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.transport == nil {
			c.transport = rt
		}
		return b.client
	})
	return config, nil
}

// RoundTrip implements http.RoundTripper. It shortens Retry-After to one second, because the client waits that long
// without a context.
func (c *client) RoundTrip(req *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancel(req.Context())
	context.AfterFunc(c.ctx, cancel)
	resp, err := c.converter.transport.RoundTrip(req.WithContext(ctx))
	if err != nil {
		return nil, err
	}
	if seconds, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil && seconds > 1 {
		resp.Header.Set("Retry-After", "1")
	}
	return resp, nil
}
