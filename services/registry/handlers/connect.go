package handlers

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/request"
	genericrest "k8s.io/apiserver/pkg/registry/generic/rest"
	"k8s.io/apiserver/pkg/registry/rest"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	api "k8s.io/kubernetes/pkg/apis/core"
	"k8s.io/kubernetes/pkg/features"
	kubeletclient "k8s.io/kubernetes/pkg/kubelet/client"
	"k8s.io/kubernetes/pkg/registry/core/node"
	noderest "k8s.io/kubernetes/pkg/registry/core/node/rest"
	"k8s.io/kubernetes/pkg/registry/core/pod"
	podrest "k8s.io/kubernetes/pkg/registry/core/pod/rest"
	"k8s.io/kubernetes/pkg/registry/core/service"

	"watershed.dev/platform/identity"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/warnings"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// Connect returns the target of a streaming request: a kubelet, a pod, a service or a node. The gateway dials it.
func (scope *RequestScope) Connect(ctx context.Context, r *registryv1.WriteRequest,
	callbacks Callbacks) (c *registryv1.Connection, err error) {
	if r.Name == "" {
		return nil, errEmptyName
	}
	ctx, warned := warnings.WithRecorder(withCallbacks(request.WithNamespace(ctx, r.Namespace), callbacks))
	defer func() {
		if err = rpc.WithWarnings(err, warned.List()); err == nil {
			c.Warnings = warned.List()
		}
	}()
	values, _ := url.ParseQuery(r.Query)
	if logStorage, ok := scope.Storage.(*podrest.LogREST); ok {
		return scope.logConnection(ctx, logStorage, r.Name, values)
	}
	connecter, ok := scope.Storage.(rest.Connecter)
	if !ok {
		return nil, scope.methodNotSupported("connect")
	}
	if len(values["dryRun"]) > 0 {
		return nil, apierrors.NewBadRequest("dryRun is not supported")
	}
	opts, subpath, key := connecter.NewConnectOptions()
	if opts != nil {
		if subpath {
			values[key] = []string{r.Subpath}
		}
		if err := scope.ParameterCodec.DecodeParameters(values, scope.Kind.GroupVersion(), opts); err != nil {
			return nil, apierrors.NewBadRequest(err.Error())
		}
	}
	if err := scope.admitConnect(ctx, r, callbacks, opts); err != nil {
		return nil, err
	}
	return scope.resolveConnection(ctx, r, opts)
}

// admitConnect runs both admission phases: first Admit, then Validate.
func (scope *RequestScope) admitConnect(
	ctx context.Context,
	r *registryv1.WriteRequest,
	callbacks Callbacks,
	opts runtime.Object,
) error {
	remote := &remoteAdmission{
		callbacks: callbacks,
		scope:     scope,
		admit:     r.Admit,
		validate:  r.Validate,
	}
	if !remote.Handles(admission.Connect) {
		return nil
	}
	attrs := admission.NewAttributesRecord(
		opts,
		nil,
		scope.Kind,
		r.Namespace,
		r.Name,
		scope.Resource,
		scope.Subresource,
		admission.Connect,
		nil,
		false,
		identity.User(r.User),
	)
	if err := remote.Admit(ctx, attrs, scope); err != nil {
		return err
	}
	return remote.Validate(ctx, attrs, scope)
}

// resolveConnection returns the target of a connection. Upstream's handlers dial the target themselves.
func (scope *RequestScope) resolveConnection(ctx context.Context, r *registryv1.WriteRequest,
	opts runtime.Object) (*registryv1.Connection, error) {
	switch s := scope.Storage.(type) {
	case *podrest.ExecREST:
		o := opts.(*api.PodExecOptions)
		return scope.upgradeConnection(ctx, r, &registryv1.Streams{
			Stdin:  o.Stdin,
			Stdout: o.Stdout,
			Stderr: o.Stderr,
			Tty:    o.TTY,
		}, func() (*url.URL, *kubeletclient.ConnectionInfo, error) {
			return pod.ExecLocation(ctx, s.Store, s.KubeletConn, r.Name, o)
		})
	case *podrest.AttachREST:
		o := opts.(*api.PodAttachOptions)
		return scope.upgradeConnection(ctx, r, &registryv1.Streams{
			Stdin:  o.Stdin,
			Stdout: o.Stdout,
			Stderr: o.Stderr,
			Tty:    o.TTY,
		}, func() (*url.URL, *kubeletclient.ConnectionInfo, error) {
			return pod.AttachLocation(ctx, s.Store, s.KubeletConn, r.Name, o)
		})
	case *podrest.PortForwardREST:
		o := opts.(*api.PodPortForwardOptions)
		return scope.upgradeConnection(ctx, r, &registryv1.Streams{PortForward: true},
			func() (*url.URL, *kubeletclient.ConnectionInfo, error) {
				return pod.PortForwardLocation(ctx, s.Store, s.KubeletConn, r.Name, o)
			})
	case *podrest.ProxyREST:
		location, _, err := pod.ResourceLocation(ctx, s.Store, s.ProxyTransport, r.Name)
		return proxyConnection(location, opts.(*api.PodProxyOptions).Path, registryv1.Transport_TRANSPORT_PROXY, err)
	case *service.ProxyREST:
		location, _, err := s.Redirector.ResourceLocation(ctx, r.Name)
		return proxyConnection(
			location,
			opts.(*api.ServiceProxyOptions).Path,
			registryv1.Transport_TRANSPORT_PROXY,
			err,
		)
	case *noderest.ProxyREST:
		location, roundTripper, err := node.ResourceLocation(s.Store, s.Connection, s.ProxyTransport, ctx, r.Name)
		transport := registryv1.Transport_TRANSPORT_KUBELET
		if roundTripper == s.ProxyTransport {
			transport = registryv1.Transport_TRANSPORT_PROXY
		}
		return proxyConnection(location, opts.(*api.NodeProxyOptions).Path, transport, err)
	}
	return nil, apierrors.NewInternalError(fmt.Errorf("no connection is defined for %s", scope))
}

// proxyConnection returns a connection in which the gateway rewrites links of responses.
func proxyConnection(
	location *url.URL,
	path string,
	transport registryv1.Transport,
	err error,
) (*registryv1.Connection, error) {
	if err != nil {
		return nil, err
	}
	location.Path = utilnet.JoinPreservingTrailingSlash(location.Path, path)
	return &registryv1.Connection{Url: location.String(), Transport: transport, Rewrite: true}, nil
}

// upgradeConnection returns a connection to a kubelet. The gateway translates a WebSocket if the kubelet supports only
// SPDY.
func (scope *RequestScope) upgradeConnection(
	ctx context.Context,
	r *registryv1.WriteRequest,
	streams *registryv1.Streams,
	locate func() (*url.URL, *kubeletclient.ConnectionInfo, error),
) (*registryv1.Connection, error) {
	if err := scope.authorizeUpgrade(ctx, r); err != nil {
		return nil, err
	}
	location, info, err := locate()
	if err != nil {
		return nil, err
	}
	c := &registryv1.Connection{
		Url:             location.String(),
		Transport:       registryv1.Transport_TRANSPORT_KUBELET,
		UpgradeRequired: true,
	}
	translateGate := features.TranslateStreamCloseWebsocketRequests
	if streams.PortForward {
		translateGate = features.PortForwardWebsockets
	}
	kubeletWebSockets := utilfeature.DefaultFeatureGate.Enabled(features.ExtendWebSocketsToKubelet) &&
		slices.Contains(info.NodeFeatures, string(features.ExtendWebSocketsToKubelet))
	if utilfeature.DefaultFeatureGate.Enabled(translateGate) && !kubeletWebSockets {
		c.Translate = streams
	}
	return c, nil
}

// authorizeUpgrade authorizes create if a WebSocket upgrade came with a GET (kubernetes issue 133515).
func (scope *RequestScope) authorizeUpgrade(ctx context.Context, r *registryv1.WriteRequest) error {
	info, ok := request.RequestInfoFrom(ctx)
	needsCreate := utilfeature.DefaultFeatureGate.Enabled(features.AuthorizePodWebsocketUpgradeCreatePermission)
	if ok && info.Verb == "create" || !needsCreate {
		return nil
	}
	decision, reason, err := Authorizer{}.Authorize(ctx, authorizer.AttributesRecord{
		User:            identity.User(r.User),
		ResourceRequest: true,
		Path:            r.Path,
		Verb:            "create",
		APIGroup:        scope.Resource.Group,
		APIVersion:      scope.Resource.Version,
		Resource:        scope.Resource.Resource,
		Subresource:     scope.Subresource,
		Namespace:       r.Namespace,
		Name:            r.Name,
	})
	if err != nil {
		return err
	}
	if decision != authorizer.DecisionAllow {
		return apierrors.NewForbidden(scope.Resource.GroupResource(), r.Name, errors.New(reason))
	}
	return nil
}

// logConnection returns a connection to the kubelet that serves a container's log.
func (scope *RequestScope) logConnection(ctx context.Context, s *podrest.LogREST, name string,
	values url.Values) (*registryv1.Connection, error) {
	opts, _, _ := s.NewGetOptions()
	if err := scope.ParameterCodec.DecodeParameters(values, scope.Kind.GroupVersion(), opts); err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	obj, err := s.Get(ctx, name, opts)
	if err != nil {
		return nil, err
	}
	streamer, ok := obj.(*genericrest.LocationStreamer)
	if !ok {
		return nil, apierrors.NewInternalError(fmt.Errorf("a log is a %T, not a LocationStreamer", obj))
	}
	c := &registryv1.Connection{
		ContentType: streamer.ContentType,
		Flush:       streamer.Flush,
		Transport:   registryv1.Transport_TRANSPORT_KUBELET,
	}
	if streamer.Location != nil {
		c.Url = streamer.Location.String()
	}
	if o, ok := opts.(*api.PodLogOptions); ok && o.InsecureSkipTLSVerifyBackend {
		c.Transport = registryv1.Transport_TRANSPORT_KUBELET_INSECURE
	}
	return c, nil
}
