package gateway

import "k8s.io/apiserver/pkg/endpoints/request"

// metricsInfo returns the RequestInfo for the labels of a request's metrics. The path is the client's choice, and a
// label's values stay in memory. So metricsInfo omits the path, and also group, version and resource unless they are
// served.
func (g *Service) metricsInfo(info *request.RequestInfo) *request.RequestInfo {
	if info == nil {
		return &request.RequestInfo{}
	}
	if info.IsResourceRequest {
		if view := g.discovery.View(); view != nil {
			if _, ok := view.APIResource(info.APIGroup, info.APIVersion, info.Resource, info.Subresource); ok {
				return info
			}
		}
	}
	out := *info
	out.Path, out.Resource, out.Subresource = "", "", ""
	if !g.views.apiServices.Handles(info.APIGroup, info.APIVersion) {
		out.APIGroup, out.APIVersion = "", ""
	}
	return &out
}
