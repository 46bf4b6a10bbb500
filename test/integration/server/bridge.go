package server

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	genericoptions "k8s.io/apiserver/pkg/server/options"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/kubernetes/cmd/kube-apiserver/app/options"
	"k8s.io/kubernetes/pkg/apis/authorization"
	authorizationconversion "k8s.io/kubernetes/pkg/apis/authorization/v1"
	"k8s.io/kubernetes/pkg/registry/authorization/util"
)

// original stands for the server's own authenticator or authorizer inside a test's union: it has no opinion, and the
// server applies its own afterwards.
type original struct{ _ byte }

// passed is the key of a *bool in a context. The original authenticator sets it.
type passed struct{}

func (*original) AuthenticateRequest(r *http.Request) (*authenticator.Response, bool, error) {
	if p, ok := r.Context().Value(passed{}).(*bool); ok {
		*p = true
	}
	return nil, false, nil
}

func (*original) Authorize(context.Context, authorizer.Attributes) (authorizer.Decision, string, error) {
	return authorizer.DecisionNoOpinion, "", nil
}

// startBehindProxy starts a server behind a proxy that authenticates with the test's authenticator. The proxy listens
// on the port of s and adds the headers of request header authentication.
func (b *Bridges) startBehindProxy(ctx context.Context, t T, dir string, s *options.ServerRunOptions) (*Server, error) {
	front := s.SecureServing.Listener
	var err error
	s.SecureServing.Listener, s.SecureServing.BindPort, err = genericoptions.CreateListener("tcp", "127.0.0.1:0",
		net.ListenConfig{})
	if err != nil {
		return nil, err
	}
	s.Authentication.RequestHeader.UIDHeaders = []string{"X-Remote-Uid"}
	server, err := Start(ctx, t, dir, s)
	if err != nil {
		return nil, err
	}
	own, err := b.clientCertificate(s.Authentication.RequestHeader.AllowedNames[0])
	if err != nil {
		return nil, err
	}
	files := s.SecureServing.ServerCert.CertKey
	serving, err := tls.LoadX509KeyPair(files.CertFile, files.KeyFile)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(server.Client.CAData)
	backend, err := url.Parse(server.Client.Host)
	if err != nil {
		return nil, err
	}
	transport := &http.Transport{
		TLSClientConfig: &tls.Config{
			Certificates: []tls.Certificate{own},
			RootCAs:      roots,
			ServerName:   server.Client.ServerName,
		},
		ForceAttemptHTTP2: true,
	}
	proxy := &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(backend); r.Out.Host = r.In.Host },
		Transport:     transport,
		FlushInterval: -1,
	}
	protocols := []string{"h2", "http/1.1"}
	handler := &http.Server{
		Handler:           b.authenticate(proxy),
		TLSConfig:         &tls.Config{Certificates: []tls.Certificate{serving}, NextProtos: protocols},
		ReadHeaderTimeout: time.Minute,
	}
	go func() { _ = handler.ServeTLS(front, "", "") }()
	ended := make(chan error, 1)
	go func() { // tests check that no goroutine remains after the server
		defer close(ended)
		for err := range server.Ended {
			ended <- err
		}
		_ = handler.Close()
		transport.CloseIdleConnections()
	}()
	server.Client.Host = "https://" + front.Addr().String()
	return &Server{Client: server.Client, Ended: ended}, nil
}

// authenticate authenticates requests, and adds the user's headers.
func (b *Bridges) authenticate(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var original bool
		r = r.WithContext(context.WithValue(r.Context(), passed{}, &original))
		loopback := r.Header.Get("Authorization") == "Bearer "+token
		response, ok, err := b.authenticator.AuthenticateRequest(r)
		switch {
		case ok && err == nil:
			r.Header.Del("Authorization")
			setUser(r.Header, response.User)
		case loopback || original && err == nil: // the server authenticates
		default:
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusUnauthorized)
			_ = json.NewEncoder(w).Encode(metav1.Status{
				TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
				Status:   metav1.StatusFailure, Message: "Unauthorized", Reason: metav1.StatusReasonUnauthorized,
				Code: http.StatusUnauthorized,
			})
			return
		}
		next.ServeHTTP(w, r)
	})
}

func setUser(h http.Header, u user.Info) {
	h.Set("X-Remote-User", u.GetName())
	if u.GetUID() != "" {
		h.Set("X-Remote-Uid", u.GetUID())
	}
	for _, g := range u.GetGroups() {
		h.Add("X-Remote-Group", g)
	}
	for key, values := range u.GetExtra() {
		for _, v := range values {
			h.Add("X-Remote-Extra-"+url.PathEscape(key), v)
		}
	}
}

func (b *Bridges) clientCertificate(name string) (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2),
		Subject:      pkix.Name{CommonName: name},
		NotBefore:    b.proxy.CA.NotBefore,
		NotAfter:     time.Now().Add(24 * time.Hour),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	var public crypto.PublicKey = &key.PublicKey
	der, err := x509.CreateCertificate(rand.Reader, template, b.proxy.CA, public, b.proxy.Key)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, err
}

// serveAuthorizer serves the test's authorizer as an authorization webhook, until ctx ends. The webhook replaces the
// modes of s. They follow it if the test's authorizer is a union with the original authorizer.
func (b *Bridges) serveAuthorizer(ctx context.Context, dir string, s *options.ServerRunOptions) error {
	webhook := httptest.NewServer(http.HandlerFunc(b.review))
	go func() {
		<-ctx.Done()
		webhook.Close()
	}()
	conf := clientcmdapi.NewConfig()
	conf.Clusters["c"] = &clientcmdapi.Cluster{Server: webhook.URL}
	conf.Contexts["x"] = &clientcmdapi.Context{Cluster: "c"}
	conf.CurrentContext = "x"
	file := filepath.Join(dir, "authorizer.kubeconfig")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := clientcmd.WriteToFile(*conf, file); err != nil {
		return err
	}
	s.Authorization.WebhookConfigFile, s.Authorization.WebhookVersion = file, "v1"
	s.Authorization.WebhookCacheAuthorizedTTL, s.Authorization.WebhookCacheUnauthorizedTTL = 0, 0
	modes := []string{"Webhook"}
	if keepsOriginal(reflect.ValueOf(b.authorizer)) {
		modes = append(modes, s.Authorization.Modes...)
	}
	s.Authorization.Modes = modes
	return nil
}

var convert = authorizationconversion.Convert_v1_SubjectAccessReviewSpec_To_authorization_SubjectAccessReviewSpec

// keepsOriginal returns true if a test's authorizer is a union or a wrapper with the original authorizer.
func keepsOriginal(v reflect.Value) bool {
	switch v.Kind() {
	case reflect.Interface, reflect.Pointer:
		return v.Type() == reflect.TypeFor[*original]() || !v.IsNil() && keepsOriginal(v.Elem())
	case reflect.Slice:
		for i := range v.Len() {
			if keepsOriginal(v.Index(i)) {
				return true
			}
		}
	case reflect.Struct:
		for _, field := range v.Fields() {
			if keepsOriginal(field) {
				return true
			}
		}
	}
	return false
}

func (b *Bridges) review(w http.ResponseWriter, r *http.Request) {
	var review authorizationv1.SubjectAccessReview
	if err := json.NewDecoder(r.Body).Decode(&review); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	var spec authorization.SubjectAccessReviewSpec
	if err := convert(&review.Spec, &spec, nil); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	attributes := util.AuthorizationAttributesFrom(spec)
	if strings.HasPrefix(attributes.GetUser().GetName(), "system:watershed:") {
		review.Status.Allowed = true // a service of Watershed, which upstream's tests do not have
	} else {
		decision, reason, err := b.authorizer.Authorize(r.Context(), attributes)
		review.Status.Allowed = decision == authorizer.DecisionAllow
		review.Status.Denied = decision == authorizer.DecisionDeny
		review.Status.Reason = reason
		if err != nil {
			review.Status.EvaluationError = fmt.Sprint(err)
		}
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(review)
}
